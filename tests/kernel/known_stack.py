"""Runs for ever in one known stack of Python and C, and says which, root first: `frame NAME FIRST_LINE LAST_LINE` for a
Python frame, `native NAME` for a C function of `extension.c`, and `above NAME ...` for the C functions that the innermost
Python frame may be in.

Loads no module but that and those that the interpreter has loaded by itself.
"""

import sys

DEPTH = 12

# The C functions that call a Python function from frames of many shapes, the outermost first, and what is called in each.
WAYS = [
    ("plain", "plain", "three_deep", "innermost"),
    ("grown", "grown", "innermost"),
    ("aligned", "aligned", "innermost"),
    ("large", "large", "innermost"),
    ("many_registers", "many_registers", "innermost"),
    ("aligned_and_grown", "aligned_and_grown", "innermost"),
    ("sorted_by_c", "sorted_by_c", "compare"),
]


def leaf():
    number = 1
    while True:
        number = (number * 29 + 7) & 0xFFFF
        if number & 0xFF == 0x55:
            extension.with_gil()
            extension.interrupted()


def descend(depth):
    if depth == 0:
        leaf()
    else:
        descend(depth - 1)


def enter(number):
    if number == len(WAYS):
        descend(DEPTH - 1)
    else:
        getattr(extension, WAYS[number][0])(lambda: enter(number + 1))


def main():
    enter(0)


def announce():
    def lines(function, first, last):
        start = function.__code__.co_firstlineno
        return "frame", function.__qualname__, start + first, start + last

    call_of_main = sys._getframe(1).f_lineno + 1
    stack = [("frame", "<module>", call_of_main, call_of_main), lines(main, 1, 1)]
    call_of_c = enter.__code__.co_firstlineno + 4
    for way in WAYS:
        stack += [lines(enter, 4, 4)]
        stack += [("native", name) for name in way[1:]]
        stack += [("frame", "enter.<locals>.<lambda>", call_of_c, call_of_c)]
    stack += [lines(enter, 2, 2)]
    stack += [lines(descend, 4, 4)] * (DEPTH - 1) + [lines(descend, 2, 2), lines(leaf, 1, 6)]
    for entry in stack:
        print(*entry)
    for above in ((), ("with_gil",), ("with_gil", "turn"), ("interrupted",), ("interrupted", "handler")):
        print("above", *above)
    print("above", "interrupted", "handler", "turn")
    print("ready", flush=True)


sys.path.insert(0, "/")
import extension

announce()
main()
