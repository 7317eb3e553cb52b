"""Greenlets that are nothing but a function in C, and work of their starter between them."""
import zlib

import greenlet
import handshake

DATA = bytes(range(256)) * 4000


def work():
    for _ in range(5):
        zlib.crc32(DATA)


def main():
    while True:
        work()
        for _ in range(5):
            greenlet.greenlet(zlib.crc32).switch(DATA)


handshake.ready()
main()
