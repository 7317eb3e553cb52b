"""A stack of frames with names of every kind: Latin-1, UCS-2 and UCS-4, long paths, a frozen module."""
import importlib._bootstrap
import sys

import handshake

TEMPLATE = """
def {name}(calls):
    return calls[0](calls[1:])
"""

NAMES = [
    ("plain", "plain.py"),
    ("caf\u00e9", "/d\u00e9j\u00e0 vu/latin-1.py"),
    ("\u51fd\u6570", "/\u76ee\u5f55/ucs-2.py"),
    ("\U00020000\U00020001", "/\U0001f40d/ucs-4.py"),
    ("n" * 300, "/medium/" + "m" * 255 + ".py"),
    ("long_path", "/long/" + "/".join("d" * 99 for _ in range(38)) + "/l.py"),
    ("long_wide_path", "/\u957f/" + "/".join("\u8def" * 49 for _ in range(24)) + "/l.py"),
    ("escape", "/a\nb;c\x1b[31m \x7f.py"),
]


def made(name, filename):
    names = {}
    exec(compile(TEMPLATE.format(name=name), filename, "exec"), names)
    return names[name]


def frozen(calls):
    # A frame of `<frozen importlib._bootstrap>`.
    return importlib._bootstrap._call_with_frames_removed(calls[0], calls[1:])


def leaf(_calls):
    handshake.ready(stacks=[handshake.stack_of(sys._getframe())])
    while True:
        pass


functions = [made(name, filename) for name, filename in NAMES] + [frozen, leaf]
functions[0](functions[1:])
