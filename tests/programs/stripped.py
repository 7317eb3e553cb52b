"""Works in a C library for ever. Its argument is `stripped.c`, compiled."""
import ctypes
import sys

import handshake

library = ctypes.CDLL(sys.argv[1])
handshake.ready()
while True:
    library.known(ctypes.c_ulong(2_000_000))
