"""Works in C, C++ and Rust of packages from PyPI."""
import json

import numpy
import orjson
import pyarrow
import pyarrow.compute
import pydantic_core

MATRIX = numpy.random.default_rng(1).random((200, 200))
NUMBERS = numpy.random.default_rng(2).random(50_000)
ARROW = pyarrow.array(NUMBERS)
DATA = [{"number": number, "list": list(range(number % 20))} for number in range(1000)]
TEXT = orjson.dumps(DATA)
VALIDATOR = pydantic_core.SchemaValidator({"type": "list", "items_schema": {"type": "dict"}})


def by_openblas():
    for _ in range(6):
        MATRIX @ MATRIX


def by_numpy():
    for _ in range(4):
        numpy.sort(NUMBERS)


def by_pyarrow():
    pyarrow.compute.sort_indices(ARROW)


def by_orjson():
    for _ in range(4):
        orjson.loads(TEXT)


def by_pydantic():
    for _ in range(12):
        VALIDATOR.validate_python(DATA)


def main():
    while True:
        for function in (by_openblas, by_numpy, by_pyarrow, by_orjson, by_pydantic):
            function()


pyarrow.set_cpu_count(1)
OBJECTS = {"by_openblas": "libscipy_openblas", "by_numpy": "_multiarray_umath", "by_pyarrow": "libarrow",
           "by_orjson": "orjson", "by_pydantic": "_pydantic_core"}
print(json.dumps({"objects": OBJECTS}), flush=True)
main()
