"""A loop hot enough for CPython's JIT, which calls functions that a trace may go through."""
import sys

import handshake


def square(number):
    return number * number


def hot():
    total = 0
    for number in range(20_000):
        total += square(number) & 7
    return total


def turns():
    while True:
        hot()


def active():
    """Whether code that the JIT made runs this very function's caller."""
    return sys._jit.is_active()


def warm():
    seen = False
    for _ in range(50_000):
        seen |= active() or sys._jit.is_active()
    return seen


hot()
handshake.ready(enabled=sys._jit.is_enabled(), active=warm())
turns()
