"""Throws and catches in C++ for ever. Its argument is `throwing.cc`, compiled."""
import ctypes
import sys
import time

import handshake

library = ctypes.CDLL(sys.argv[1])
Clock = ctypes.CFUNCTYPE(ctypes.c_double)
clock = Clock(time.thread_time)
library.throwing.argtypes = ctypes.c_double, Clock


def thrower():
    library.throwing(0.2, clock)


handshake.ready(functions=["throwing", "catching", "first", "second", "third"])
while True:
    thrower()
