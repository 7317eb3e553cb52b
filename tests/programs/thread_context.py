"""Threads that publish a thread context through the library that is named, started before it is loaded and after, and one that
publishes nothing. Tells where each has the variable. `-`: the library was loaded with the program."""

import ctypes
import json
import sys
import threading

THREADS = 6
told = {}
loaded = threading.Event()
ready = threading.Barrier(THREADS + 1)


def run(number):
    loaded.wait()
    told[number] = {"tp": library.thread_pointer(), "at": library.publish(number) if number else 0, "number": number}
    ready.wait()
    ready.wait()


def start(numbers):
    for number in numbers:
        threading.Thread(target=run, args=(number,), daemon=True).start()


start(range(THREADS // 2))
library = ctypes.CDLL(None if sys.argv[1] == "-" else sys.argv[1])
library.publish.restype = library.thread_pointer.restype = ctypes.c_uint64
start(range(THREADS // 2, THREADS))
loaded.set()
ready.wait()
print(json.dumps({"threads": [told[number] for number in range(THREADS)]}), flush=True)
sys.stdin.read()
