"""A thread that is asleep when the recording begins, wakes after some seconds, and waits elsewhere from then on. It never works."""
import sys
import threading
from time import sleep

import handshake

LOCK = threading.Lock()
LOCK.acquire()


def first(seconds):
    sleep(seconds)


def then():
    LOCK.acquire()


def sleeper():
    first(float(sys.argv[1]))
    then()


thread = threading.Thread(target=sleeper, daemon=True)
thread.start()
handshake.ready()
thread.join()
