"""Prints what this interpreter itself says about line tables: one JSON object for each code object.

Compiles big modules of the standard library and a few sources made to be awkward.
"""

import ctypes
import glob
import itertools
import json
import os
import sys
import types

MODULES = [
    "_pydecimal.py", "_pyio.py", "argparse.py", "ast.py", "datetime.py", "difflib.py", "doctest.py", "inspect.py",
    "logging/__init__.py", "pdb.py", "pickle.py", "pickletools.py", "platform.py", "smtplib.py", "subprocess.py",
    "tarfile.py", "threading.py", "turtle.py", "typing.py", "zipfile.py", "xml/dom/minidom.py", "unittest/mock.py",
]

AWKWARD = [
    "",
    "x = 1",
    # Gaps in lines that take one, two and three table entries, forwards and backwards.
    "def f(a):\n" + "\n" * 130 + "    a()\n" + "\n" * 300 + "    return a\n" + "\n" * 70000 + "f(1)\n",
    "x = (\n" + "\n" * 400 + "  a,\n" + "\n" * 400 + "  b\n)\n",
    "for i in range(3):\n" + "\n" * 200 + "    if i:\n" + "\n" * 200 + "        print(i)\n",
    # Columns past 80, 127 and 255, and wide characters before the code.
    " " * 0 + "x = " + " + ".join("name%d" % i for i in range(200)),
    "y = '" + "\u00e4\u4e2d\U0001f600" * 40 + "' + str(x) + str(y)",
    "def g():\n" + " " * 300 + "return h(1,\n" + " " * 290 + "2)\n",
    # Code without a place of its own.
    "def h():\n    try:\n        yield 1\n    finally:\n        with a as b, c:\n            async_ = [i for i in b if i]\n",
    "async def k():\n    async with a:\n        async for x in b:\n            await x\n    return {i: j async for i, j in c}\n",
    # A table of many entries, with long ranges.
    "z = [" + ",\n".join("f(%d) + a[%d].b" % (i, i) for i in range(400)) + "]",
]

addr2line = ctypes.pythonapi.PyCode_Addr2Line
addr2line.argtypes = [ctypes.py_object, ctypes.c_int]
addr2line.restype = ctypes.c_int


def runs(values):
    return [[len(list(run)), value] for value, run in itertools.groupby(values)]


def tell(code):
    size = len(code.co_code)
    fact = {
        "name": code.co_name,
        "firstlineno": code.co_firstlineno,
        "table": (code.co_linetable if sys.version_info >= (3, 10) else code.co_lnotab).hex(),
        "not_started": addr2line(code, -1),
        # Of each code unit, as runs.
        "lines": runs(addr2line(code, at) for at in range(0, size, 2)),
    }
    if sys.version_info >= (3, 11):
        fact["positions"] = runs([-1 if n is None else n for n in position] for position in code.co_positions())
    print(json.dumps(fact))


def walk(code):
    tell(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            walk(constant)


def main():
    lib = os.path.dirname(os.__file__)
    paths = [os.path.join(lib, module) for module in MODULES] + sorted(glob.glob(os.path.join(lib, "asyncio", "*.py")))
    for path in paths:
        if os.path.exists(path):
            with open(path, "rb") as file:
                walk(compile(file.read(), path, "exec"))
    for number, source in enumerate(AWKWARD):
        code = compile(source, "<awkward %d>" % number, "exec")
        walk(code)
        # First lines the compiler never gives.
        for first in (0, 2**30):
            tell(code.replace(co_firstlineno=first))


main()
