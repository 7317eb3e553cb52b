"""Makes functions with names of every storage kind, tells where their code objects are, and waits.

Offsets in the code object are found by looking for the values themselves.
"""

import ctypes
import json
import struct
import sys

NAMES = ["ascii_name", "gr\u00fc\u00dfe", "\u03b1\u03b2\u03b3", "\U00020000_x"]
FILES = ["/tmp/plain.py", "/tmp/gr\u00fcn\n.py", "/tmp/\u4e2d\udcff.py", "/tmp/\U0001f600.py"]
MODERN = sys.version_info >= (3, 11)

codes = []
for name, file in zip(NAMES, FILES):
    space = {}
    exec(compile("\n\ndef %s(a):\n    return [i +\n a for i in a]\n" % name, file, "exec"), space)
    codes.append(space[name].__code__)


def find(code, value):
    return ctypes.string_at(id(code), 256).index(struct.pack("<Q", id(value)))


def table(code):
    return code.co_linetable if sys.version_info >= (3, 10) else code.co_lnotab


code = codes[0]
head = ctypes.string_at(id(code), 256)
first = code.replace(co_firstlineno=0x12345678)
print(json.dumps({
    "qualname": find(code, code.co_qualname if MODERN else code.co_name),
    "filename": find(code, code.co_filename),
    "linetable": find(code, table(code)),
    "firstlineno": ctypes.string_at(id(first), 256).index(struct.pack("<i", 0x12345678)),
    "codes": [
        {
            "address": id(code),
            "qualname": code.co_qualname if MODERN else code.co_name,
            "filename": code.co_filename.encode("utf-8", "replace").decode(),
            "last": (list(code.co_positions())[-1] if MODERN else None),
            "length": len(code.co_code),
        }
        for code in codes
    ],
}), flush=True)
sys.stdin.read()
