"""Runs for ever in a stack of more frames than a sample holds, of Python (1,024) and of C (512), and says `ready`.

Loads no module.
"""

import sys

# Each such call has four frames of C or more: of `max` and of the evaluator that it calls.
THROUGH_C = 140
PYTHON_ALONE = 900


def leaf():
    print("ready", flush=True)
    while True:
        pass


def through_c(number):
    if number == 0:
        descend(PYTHON_ALONE)
    else:
        max((number - 1,), key=through_c)


def descend(depth):
    if depth == 0:
        leaf()
    else:
        descend(depth - 1)


sys.setrecursionlimit(10_000)
through_c(THROUGH_C)
