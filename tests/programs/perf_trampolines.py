"""Calls itself and then C, for ever: under `-X perf` each call of a Python function goes through a trampoline."""
import sys
import zlib

import handshake

DATA = bytes(range(256)) * 4000


def leaf():
    return zlib.crc32(DATA)


def middle(depth):
    return leaf() if depth == 0 else middle(depth - 1)


handshake.ready(active=sys.is_stack_trampoline_active())
while True:
    middle(5)
