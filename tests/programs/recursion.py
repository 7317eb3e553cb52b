"""A recursion of 1,000 frames with the module below it."""
import sys

import handshake

DEPTH = 1000
sys.setrecursionlimit(2 * DEPTH)


def down(depth):
    if depth > 1:
        return down(depth - 1)
    handshake.ready(stacks=[handshake.stack_of(sys._getframe())])
    while True:
        pass


down(DEPTH)
