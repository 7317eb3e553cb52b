"""Two greenlets by turns, each of which works in C for some milliseconds."""
import zlib

import greenlet
import handshake

DATA = bytes(range(256)) * 4000


def work():
    for _ in range(20):
        zlib.crc32(DATA)


def one():
    while True:
        work()
        second.switch()


def two():
    while True:
        work()
        first.switch()


first, second = greenlet.greenlet(one), greenlet.greenlet(two)
handshake.ready()
first.switch()
