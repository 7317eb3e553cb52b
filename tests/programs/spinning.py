"""Goes from one C function that spins in one instruction to the next; the test moves it on. Its argument is `spinning.c`,
compiled."""
import ctypes
import re
import sys

import handshake

library = ctypes.CDLL(sys.argv[1])
Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))
FUNCTIONS = [
    "plain", "three_deep", "grown", "aligned", "aligned_and_grown", "large", "in_qsort", "in_signal_handler",
    "before_prologue", "in_epilogue", "in_register", "in_memory",
]


def by_generator():
    yield library.plain_too(0)


def by_key(number):
    return next(by_generator())


def by_regex(match):
    return str(sorted([1], key=by_key))


def compare(one, other):
    re.sub("x", by_regex, "x")
    return 0


handshake.ready(positions=FUNCTIONS + ["by_callbacks"])
for name in FUNCTIONS:
    getattr(library, name)(77)
ctypes.CDLL(None).qsort((ctypes.c_int * 2)(2, 1), 2, 4, Callback(compare))
handshake.until_closed()
