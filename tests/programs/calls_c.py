"""Calls C that works, and C that calls back."""
import json
try:
    import ctypes
    import zlib
except ImportError:
    # Some small builds lack them.
    ctypes = zlib = None

DATA = bytes(range(256)) * 400
if ctypes:
    ARRAY = (ctypes.c_int * 300)(*(number * 7919 % 300 for number in range(300)))
    COMPARE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))
    LIBC = ctypes.CDLL(None)


def busy(rounds):
    total = 0
    for number in range(rounds):
        total += number * number
    return total


def compare(one, other):
    busy(20)
    return one[0] - other[0]


def key(number):
    busy(20)
    return -number


def by_qsort():
    array = type(ARRAY).from_buffer_copy(ARRAY)
    LIBC.qsort(array, len(array), ctypes.sizeof(ctypes.c_int), COMPARE(compare))


def by_sorted():
    sorted(range(1000), key=key)


def by_zlib():
    zlib.compress(DATA)


def main():
    while True:
        by_sorted()
        if ctypes:
            by_qsort()
            by_zlib()


print(json.dumps({"ways": ["sorted", "qsort", "zlib"] if ctypes else ["sorted"]}), flush=True)
main()
