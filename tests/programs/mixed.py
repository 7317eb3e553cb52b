"""Threads that sleep, each called by Python through C in another way: for `tachyon-bpf dump --native`.

Each thread has the name of its first function here, and says which of the functions below must show, innermost first.
"""
import functools
import re
import sys
import threading
import time

import handshake

DEPTH = 100


def nap(*_):
    time.sleep(3600)


def key(_):
    nap()


def by_sorted():
    sorted([1, 2], key=key)


def substitute(_):
    nap()


def by_re():
    re.sub("a", substitute, "banana")


def numbers():
    nap()
    yield 1


def by_generator():
    for _ in numbers():
        pass


def by_list():
    list(numbers())


class Odd:
    """Every way in which C calls a method."""

    def __init__(self, sleepy=False):
        if sleepy:
            nap()

    def __call__(self):
        nap()

    def __lt__(self, other):
        nap()

    def __getattr__(self, name):
        nap()


class Last:
    """Sleeps when it ends."""

    def __del__(self):
        nap()


def by_init():
    Odd(True)


def by_call():
    Odd()()


def by_compare():
    max(Odd(), Odd())


def by_getattr():
    Odd().anything


def by_del():
    last = Last()
    del last


def by_exec():
    exec("nap()")


def by_partial():
    functools.partial(key, 1)()


def nest(depth):
    if depth:
        sorted([depth], key=lambda _: nest(depth - 1))
    else:
        nap()


def by_nest():
    nest(DEPTH)


def by_qsort():
    import ctypes

    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    array = (ctypes.c_int * 2)(2, 1)
    ctypes.CDLL(None).qsort(array, 2, 4, kind(compare))


def compare(_one, _other):
    nap()
    return 0


NESTED = ["nest"] + ["<lambda>", "nest"] * DEPTH
PATHS = {
    by_sorted: ["nap", "key"],
    by_re: ["nap", "substitute"],
    by_generator: ["nap", "numbers"],
    by_list: ["nap", "numbers"],
    by_init: ["nap", "__init__"],
    by_call: ["nap", "__call__"],
    by_compare: ["nap", "__lt__"],
    by_getattr: ["nap", "__getattr__"],
    by_del: ["nap", "__del__"],
    by_exec: ["nap", "<module>"],
    by_partial: ["nap", "key"],
    by_nest: ["nap"] + NESTED,
}
try:
    import ctypes

    ctypes.CDLL(None).qsort
    PATHS[by_qsort] = ["nap", "compare"]
except (ImportError, OSError, AttributeError):
    pass  # a static C library has no dlopen

sys.setrecursionlimit(10_000)
threading.stack_size(16 << 20)  # musl's own is 128 KiB
for function in PATHS:
    threading.Thread(target=function, name=function.__name__, daemon=True).start()
handshake.ready(paths={function.__name__: path + [function.__name__] for function, path in PATHS.items()})
sys.stdin.read()
