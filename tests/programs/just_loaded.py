"""`just_loaded.py LIBRARY [TURNS [PAUSE]]` loads one library after another, each of them a copy of its own of the one that it is given,
and works in each at once, for that many turns (some milliseconds) and never again: nobody has seen it before. In between it works
without them, for that many seconds."""

import ctypes
import os
import shutil
import sys

import handshake

TURNS = int(sys.argv[2]) if len(sys.argv) > 2 else 5_000_000
PAUSE = float(sys.argv[3]) if len(sys.argv) > 3 else 0.01


def work(function):
    function(TURNS)


def load(number):
    path = f"{sys.argv[1]}.{number}"
    shutil.copyfile(sys.argv[1], path)
    library = ctypes.CDLL(path)
    os.unlink(path)
    work(library.outer)


handshake.ready()
number = 0
while True:
    load(number)
    handshake.spin(PAUSE)
    number += 1
