"""Hashes without the GIL for 40 % of its CPU time and runs Python with it for 60 %, in turns of some milliseconds.

The turns are of random length: equal ones may keep step with the sampling.
"""
import hashlib
import random
from time import thread_time

import handshake

BUFFER = memoryview(bytes(3_000_000))


def released(part):
    hashlib.sha256(part)


def held(seconds):
    end = thread_time() + seconds
    while thread_time() < end:
        pass


handshake.ready(held_share=0.6)
while True:
    part = BUFFER[:random.randrange(500_000, len(BUFFER))]
    start = thread_time()
    released(part)
    held((thread_time() - start) * 1.5)
