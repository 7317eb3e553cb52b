"""Eight threads that sleep for a moment, and then do something else for a shorter one, in other functions: a stack that is taken later than
the wait that it is of shows those."""
import threading
from time import sleep

import handshake


def waits():
    sleep(0.003)


def later():
    handshake.spin(0.0001)


def turns():
    while True:
        waits()
        later()


for _ in range(7):
    threading.Thread(target=turns, daemon=True).start()
handshake.ready(line=waits.__code__.co_firstlineno + 1)
turns()
