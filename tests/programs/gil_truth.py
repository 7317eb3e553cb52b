"""Two threads that spin in C, with the GIL and without it, by turns. The argument is the library of `truth.c`, whose functions
`with_gil` and `without_gil` are what their names say.
"""
import ctypes
import sys
import threading

import handshake

library = ctypes.PyDLL(sys.argv[1])


def work():
    while True:
        library.hold(20_000)
        library.release(30_000)


handshake.ready()
threading.Thread(target=work, daemon=True).start()
work()
