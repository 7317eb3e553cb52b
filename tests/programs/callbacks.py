"""Goes to and fro between Python and C in many ways, shortly in each: at a random moment it may be in any of them."""
import ctypes
import hashlib
import itertools
import json
import os
import random
import re
import threading
import time
import zlib

import handshake

libc = ctypes.CDLL(None)
Compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))


def by_qsort(numbers=tuple((n * 37) % 64 for n in range(64))):
    array = (ctypes.c_int * len(numbers))(*numbers)
    libc.qsort(array, len(array), ctypes.sizeof(ctypes.c_int), Compare(lambda a, b: a[0] - b[0]))


def nested(depth):
    """Python and C in turns, `depth` of each."""
    def compare(a, b):
        if depth:
            nested(depth - 1)
        return 0
    array = (ctypes.c_int * 2)(2, 1)
    libc.qsort(array, 2, ctypes.sizeof(ctypes.c_int), Compare(compare))


def by_sorted(numbers=list(range(200))):
    sorted(numbers, key=lambda number: -number)
    max(numbers, key=lambda number: number * number)


def by_regex(text="the quick brown fox " * 20):
    re.sub(r"\w+", lambda match: match.group().upper(), text)
    re.search(r"(a|b|c)*d(x+x+)+y", "abcabcabc" * 4 + "xxxxxxxxxx")


def by_json(text=json.dumps({"list": [{"number": n, "text": "x" * n} for n in range(100)]})):
    json.loads(text, object_hook=lambda found: found)
    json.dumps(json.loads(text))


def by_generator():
    def squares():
        for number in range(200):
            yield number * number
    return sum(itertools.islice(map(lambda number: number + 1, squares()), 150))


def by_library(data=bytes((n * n) % 251 for n in range(1 << 14))):
    zlib.decompress(zlib.compress(data, 6))
    hashlib.sha1(data).digest()
    hashlib.sha256(data).digest()
    hashlib.blake2b(data).digest()
    time.time()
    os.getppid()


class Node:
    """Compared, hashed, printed and torn down by C."""

    def __init__(self, number):
        self.number = number
        self.itself = self

    def __lt__(self, other):
        return self.number < other.number

    def __hash__(self):
        return hash(self.number)

    def __eq__(self, other):
        return self.number == other.number

    def __repr__(self):
        return "Node({})".format(self.number)

    def __del__(self):
        self.number = 0


def by_slots():
    nodes = [Node(number) for number in range(40)]
    nodes.sort()
    str(nodes)
    {node: node for node in nodes}
    "%s" % (nodes,)


def by_integers():
    return pow(3, 2000) % 1000007 + int("7" * 400) // 12345 + len(str(1 << 2000))


def turn():
    for function in (by_qsort, by_sorted, by_regex, by_json, by_generator, by_library, by_slots, by_integers):
        function()
    nested(8)


random.seed(1)
turn()
thread = threading.Thread(target=turn)
thread.start()
thread.join()
handshake.ready()
while True:
    turn()
