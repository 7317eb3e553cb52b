"""Four busy threads in the same functions, each at lines of its own.

Free-threaded CPython gives each thread a copy of the bytecode (3.14): the instruction pointer alone tells no line.
"""
import ast
import sys
import threading

import handshake

try:
    from _testinternalcapi import get_tlbc_id
except ImportError:
    get_tlbc_id = None

COUNT = 4
A = 3 ** 900
B = 7 ** 700
stacks = {}
copies = set()
all_there = threading.Barrier(COUNT + 1)


def busy(kind):
    stacks[kind] = (threading.get_native_id(), handshake.stack_of(sys._getframe()))
    if get_tlbc_id is not None:
        copies.add(get_tlbc_id(busy))
    all_there.wait()
    while True:
        if kind == 0:
            _ = A * B
        elif kind == 1:
            _ = A * B
        elif kind == 2:
            _ = A * B
        else:
            _ = A * B


def enter(kind):
    if kind == 0:
        busy(kind)
    elif kind == 1:
        busy(kind)
    elif kind == 2:
        busy(kind)
    else:
        busy(kind)


def multiplications():
    """Where `busy` multiplies, by kind."""
    with open(__file__, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    function = next(node for node in tree.body if getattr(node, "name", "") == "busy")
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.BinOp)]
    return sorted([node.lineno, node.end_lineno, node.col_offset, node.end_col_offset] for node in nodes)


for kind in range(COUNT):
    threading.Thread(target=enter, args=(kind,), daemon=True).start()
all_there.wait()
handshake.ready(
    stacks=[stacks[kind][1] for kind in range(COUNT)],
    threads={str(stacks[kind][0]): kind for kind in range(COUNT)},
    multiplications=multiplications(),
    copies=len(copies),
)
handshake.until_closed()
