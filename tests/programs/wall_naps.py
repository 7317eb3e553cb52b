"""Threads that do nothing but sleep, each for another time, again and again; one more that is asleep before the first look."""
import threading
from time import sleep

import handshake

LOCK = threading.Lock()
LOCK.acquire()


def forever():
    LOCK.acquire()


def naps(seconds):
    while True:
        sleep(seconds)


for seconds in (0.03, 0.21, 0.37, 0.53, 0.71, 1.3, 2.9):
    threading.Thread(target=naps, args=(seconds,), daemon=True).start()
threading.Thread(target=forever, daemon=True).start()
handshake.ready()
forever()
