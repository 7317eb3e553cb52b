"""Collects garbage whose finalizer lets go of the GIL, while another thread works."""
import gc
import hashlib
import threading

import handshake

BUFFER = bytes(2_000_000)


class Item:
    def __init__(self):
        self.me = self

    def __del__(self):
        hashlib.sha256(BUFFER)


def collecting():
    gc.collect()


def turns():
    while True:
        Item()
        collecting()


def other(told):
    told.append(threading.get_native_id())
    while True:
        handshake.spin(0.01)


gc.disable()
TOLD = []
threading.Thread(target=other, args=(TOLD,), daemon=True).start()
while not TOLD:
    pass
handshake.ready(other=TOLD[0])
turns()
