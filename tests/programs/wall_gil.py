"""Four threads that want the GIL all the time."""
import threading

import handshake


def spins():
    number = 0
    while True:
        for step in range(1000):
            number += step


for _ in range(3):
    threading.Thread(target=spins, daemon=True).start()
handshake.ready()
spins()
