"""A stack of exactly 30 frames that never changes: methods, closures, lambdas, a generator, a class body.

The leaf multiplies big numbers at three places that take about the same time. `hot` lists those places.
"""
import ast
import sys

import handshake

DEPTH = 30
A = 3 ** 900
B = 7 ** 700


def leaf():
    expected = handshake.stack_of(sys._getframe())
    assert len(expected["callers"]) == DEPTH - 1, len(expected["callers"])
    handshake.ready(stacks=[expected], hot=hot_places())
    while True:
        _ = A * B
        _ = (A + 1) * (
            B + 1)
        if True: _ = B * A


def hot_places():
    """The multiplications of `leaf`, by its syntax tree."""
    with open(__file__, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    function = next(node for node in tree.body if getattr(node, "name", "") == "leaf")
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)]
    if not hasattr(leaf.__code__, "co_positions"):
        # Up to 3.10 there are only lines.
        return [[node.lineno, node.lineno, -1, -1] for node in nodes]
    return [[node.lineno, node.end_lineno, node.col_offset, node.end_col_offset] for node in nodes]


class Chain:
    """Five rounds of five frames, entered through a generator that C code resumes."""

    def begin(self):
        return next(self.first(5) for _ in "x")

    def first(self, rounds):
        return self.second(
            rounds,
        )

    def second(self, rounds):
        def inner():
            return (lambda: 1 + self.third(rounds - 1))()

        return inner()

    def third(self, rounds):
        return self.first(rounds) if rounds else leaf()


class Body:
    """Runs everything while its body is executed: a class body is a frame too."""

    Chain().begin()
