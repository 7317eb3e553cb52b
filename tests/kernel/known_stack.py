"""Runs for ever in one known stack, and says which: `frame NAME FIRST_LINE LAST_LINE` for each, root first.

Loads no module that the interpreter has not loaded by itself. With `--modules` it prints the files of those that it has,
which is what a guest needs to run it, and ends.
"""

import sys

DEPTH = 12


def leaf():
    number = 1
    while True:
        number = (number * 31 + 7) & 0xFFFF


def descend(depth):
    if depth == 0:
        leaf()
    else:
        descend(depth - 1)


def main():
    descend(DEPTH - 1)


def announce():
    def lines(function, first, last):
        start = function.__code__.co_firstlineno
        return function.__name__, start + first, start + last

    call_of_main = sys._getframe(1).f_lineno + 1
    stack = [("<module>", call_of_main, call_of_main), lines(main, 1, 1)]
    stack += [lines(descend, 4, 4)] * (DEPTH - 1) + [lines(descend, 2, 2), lines(leaf, 1, 3)]
    for frame in stack:
        print("frame", *frame)
    print("ready", flush=True)


if "--modules" in sys.argv:
    files = {getattr(module, "__file__", None) for module in sys.modules.values()}
    print(*sorted(files - {None, __file__}), sep="\n")
else:
    announce()
    main()
