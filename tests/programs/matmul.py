"""Multiplies matrices with numpy, whose OpenBLAS does it in assembly language."""
import json

import numpy

MATRIX = numpy.random.default_rng(1).random((300, 300))


def multiply():
    MATRIX @ MATRIX


print(json.dumps({}), flush=True)
while True:
    multiply()
