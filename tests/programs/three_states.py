"""Works by turns with the GIL, in C code without it, and while it handles an exception: some milliseconds each.

The turns are of random length: equal ones keep step with the sampling.
Its arguments say at what: one of `held`, `released`, `handling` or more. With `two` another thread does the same.
"""
import hashlib
import random
import sys
import threading

import handshake

BUFFER = memoryview(bytes(3_000_000))


def held():
    handshake.spin(random.uniform(0.001, 0.005))


def released():
    hashlib.sha256(BUFFER[:random.randrange(500_000, len(BUFFER))])


def handling():
    try:
        raise ValueError
    except ValueError:
        handshake.spin(random.uniform(0.001, 0.003))


def turns(parts):
    while True:
        for part in parts:
            part()


words = sys.argv[1:]
parts = [function for function in (held, released, handling) if function.__name__ in words]
handshake.ready()
if "two" in words:
    threading.Thread(target=turns, args=(parts,), daemon=True).start()
turns(parts)
