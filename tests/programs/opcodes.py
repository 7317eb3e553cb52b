"""Calls that never return, after a warm-up: which opcode each frame is at, by name, as this interpreter's `dis` says.

`callers` has each waiting function's opcode, in its general and in its adaptive form; `leaf` has all of the leaf's.
"""
import dis
import sys

import handshake

A = 3 ** 900
B = 7 ** 700
warm = True


def opnames(code, offset=None):
    """Names of the instructions at this offset, or at all: general and as specialized now."""
    found = set()
    for adaptive in (False, True):
        for instruction in dis.get_instructions(code, adaptive=adaptive):
            if offset is None or instruction.offset == offset:
                found.add(instruction.opname)
    return sorted(found)


def leaf():
    if warm:
        return
    callers = {}
    frame = sys._getframe().f_back
    while frame is not None:
        callers[frame.f_code.co_name] = opnames(frame.f_code, frame.f_lasti)
        frame = frame.f_back
    handshake.ready(callers=callers, leaf=opnames(leaf.__code__))
    while True:
        _ = A * B
        _ = [A, B]


class Caller:
    def method(self):
        leaf()

    @property
    def attribute(self):
        self.method()


def by_attribute(caller):
    return caller.attribute


def by_keyword(caller):
    by_attribute(caller=caller)


caller = Caller()
for _ in range(10_000):
    by_keyword(caller)
warm = False
by_keyword(caller)
