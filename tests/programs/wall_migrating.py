"""500 threads that sleep twice as long in one function as in another; where asked to, each goes to another CPU before each sleep."""
import os
import sys
import threading
from time import sleep

import handshake

CPUS = sorted(os.sched_getaffinity(0))
MOVES = sys.argv[1] == "moves"


def sleeps_long():
    sleep(0.4)


def sleeps():
    sleep(0.2)


def works(turn):
    while True:
        if MOVES:
            os.sched_setaffinity(0, {CPUS[turn % len(CPUS)]})
        turn += 1
        sleeps_long()
        sleeps()


for number in range(499):
    threading.Thread(target=works, args=(number,), daemon=True).start()
handshake.ready()
works(0)
