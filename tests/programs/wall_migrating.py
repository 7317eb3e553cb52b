"""500 threads, of which all but the first sleep twice as long in one function as in another; where asked to, each goes to another CPU before
each sleep.

Tells how long they were in each function when it is asked.
"""
import json
import os
import sys
import threading
from time import monotonic, sleep

import handshake

CPUS = sorted(os.sched_getaffinity(0))
MOVES = sys.argv[1] == "moves"
LONG = [0.0] * 500
SHORT = [0.0] * 500


def sleeps_long():
    sleep(0.4)


def sleeps():
    sleep(0.2)


def works(number):
    turn = number
    # Not in step with the others.
    sleep(0.6 * number / 500)
    while True:
        if MOVES:
            os.sched_setaffinity(0, {CPUS[turn % len(CPUS)]})
        turn += 1
        begin = monotonic()
        sleeps_long()
        between = monotonic()
        sleeps()
        end = monotonic()
        LONG[number] += between - begin
        SHORT[number] += end - between


for number in range(1, 500):
    threading.Thread(target=works, args=(number,), daemon=True).start()
sleep(0.7)
handshake.ready()
for _ in sys.stdin:
    print(json.dumps({"long_s": sum(LONG), "short_s": sum(SHORT)}), flush=True)
