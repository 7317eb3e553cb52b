"""Two busy threads that by turns multiply big numbers with the GIL held and hash without it, milliseconds each.

While a thread is inside one multiplication it holds the GIL: no other thread can.
"""
import ast
import hashlib
import threading

import handshake

A = 3 ** 60_000
B = 7 ** 55_000
BUFFER = bytes(1_500_000)


def work():
    while True:
        _ = A * B
        hashlib.sha256(BUFFER)


with open(__file__, encoding="utf-8") as source:
    tree = ast.parse(source.read())
function = next(node for node in tree.body if getattr(node, "name", "") == "work")
multiplication = next(node for node in ast.walk(function) if isinstance(node, ast.BinOp))
handshake.ready(
    multiplication=[
        multiplication.lineno, multiplication.end_lineno, multiplication.col_offset, multiplication.end_col_offset
    ]
)
other = threading.Thread(target=work)
other.start()
work()
