"""Works by turns with the GIL, in C code without it, and while it handles an exception: some milliseconds each."""
import hashlib

import handshake

BUFFER = bytes(1_500_000)


def held():
    handshake.spin(0.003)


def released():
    hashlib.sha256(BUFFER)


def handling():
    try:
        raise ValueError
    except ValueError:
        handshake.spin(0.002)


handshake.ready()
while True:
    held()
    released()
    handling()
