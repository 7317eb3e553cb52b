"""One thread waits for a lock again and again, which another one releases after a while."""
import threading
from time import sleep

import handshake

LOCK = threading.Lock()
LOCK.acquire()
READY = threading.Event()
TIDS = {}


def consumes():
    LOCK.acquire()


def produces():
    LOCK.release()


def consumer():
    TIDS["consumer"] = threading.get_native_id()
    READY.set()
    while True:
        consumes()


threading.Thread(target=consumer, daemon=True).start()
READY.wait()
handshake.ready(**TIDS)
while True:
    sleep(0.005)
    # Where the machine is busy, the other one has not come back yet.
    if LOCK.locked():
        produces()
