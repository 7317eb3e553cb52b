"""Calls of Python by Python, over and over, from two depths that put the callee's frame at the same address.

A stack whose innermost frame is not yet joined to its caller would show the other one's.
`edges` are all the calls there are: [caller, callee], with every place of each function.
"""
import sys

import handshake


def empty():
    pass


def shallow():
    empty()


def deep():
    deeper()


def deeper():
    empty()


def run():
    while True:
        shallow()
        deep()


# One frame as big as the two others together: 9 words are the frame's own, the rest is its stack.
shallow.__code__ = shallow.__code__.replace(
    co_stacksize=9 + deep.__code__.co_stacksize + deeper.__code__.co_stacksize
)
CALLS = [(run, [shallow, deep]), (shallow, [empty]), (deep, [deeper]), (deeper, [empty])]
functions = {handshake.name_of(function.__code__): function for pair in CALLS for function in [pair[0]] + pair[1]}
handshake.ready(
    filename=__file__,
    edges=[["<module>", "run"]] + [[handshake.name_of(caller.__code__), handshake.name_of(callee.__code__)] for caller, callees in CALLS for callee in callees],
    positions=dict(
        {name: handshake.positions(function.__code__) for name, function in functions.items()},
        **{"<module>": handshake.positions(sys._getframe().f_code)}
    ),
)
run()
