"""Spends its time below a C function: `qsort` with a callback, `zlib`, the clock, a system call, or hand-written SHA-1."""
import ctypes
import hashlib
import os
import sys
import time
import zlib

import handshake


def qsort():
    libc = ctypes.CDLL(None)
    compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))
    callback = compare(lambda a, b: a[0] - b[0])
    numbers = (ctypes.c_int * 64)(*((n * 37) % 64 for n in range(64)))
    while True:
        libc.qsort(numbers, len(numbers), ctypes.sizeof(ctypes.c_int), callback)


def deflate():
    data = bytes((n * n) % 251 for n in range(1 << 16))
    while True:
        zlib.compress(data, 9)


def clock():
    now = time.time
    while True:
        now()


def syscall():
    getppid = os.getppid
    while True:
        getppid()


def sha1():
    data = bytes(1 << 20)
    while True:
        hashlib.sha1(data)


handshake.ready()
{"qsort": qsort, "deflate": deflate, "clock": clock, "syscall": syscall, "sha1": sha1}[sys.argv[1]]()
