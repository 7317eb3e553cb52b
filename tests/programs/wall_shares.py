"""Sleeps for 7 of every 10 milliseconds and waits for a lock for the rest; one thread waits for another lock all the time.

Tells the time of each so far when it is asked, and goes on.
"""
import threading
from time import monotonic, sleep

import handshake

TAKEN = threading.Lock()
TAKEN.acquire()
OTHER = threading.Lock()
OTHER.acquire()


def forever():
    OTHER.acquire()


def sleeps():
    sleep(0.007)


def locks():
    TAKEN.acquire(timeout=0.003)


threading.Thread(target=forever, daemon=True).start()
handshake.ready()
while True:
    sleeps()
    locks()
