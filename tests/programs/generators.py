"""A chain of generators, `yield from` and `for`, that is driven from two places."""
import sys

import handshake

stacks = {}


def innermost():
    while True:
        yield work()


def work():
    frame = sys._getframe()
    driver = frame.f_back.f_back.f_back.f_back.f_code.co_name
    if driver not in stacks:
        stacks[driver] = handshake.stack_of(frame)
    handshake.spin(0.01)


def middle():
    yield from innermost()


def outer():
    for value in middle():
        yield value


def first():
    next(chain)


def second():
    for _ in chain:
        break


def third():
    (lambda: chain.send(None))()


def turn():
    first()
    second()
    third()


chain = outer()
said = False
while True:
    turn()
    if not said:
        handshake.ready(stacks=list(stacks.values()), below=handshake.leaf_of(handshake.spin.__code__))
        said = True
