"""Three functions that take 60, 30 and 10 % of the CPU time, measured by the thread's own CPU clock.

The turns are of random length: equal ones may keep step with the sampling, whose interval stays as it is for a quarter of a
second.
"""
import random

import handshake
from time import thread_time


def sixty(end):
    while thread_time() < end:
        pass


def thirty(end):
    while thread_time() < end:
        pass


def ten(end):
    while thread_time() < end:
        pass


handshake.ready(shares={"sixty": 0.6, "thirty": 0.3, "ten": 0.1})
at = thread_time()
while True:
    turn = random.uniform(0.003, 0.011)
    # What one function takes too long the next one has less: the shares stay exact.
    sixty(at + 0.6 * turn)
    thirty(at + 0.9 * turn)
    at += turn
    ten(at)
