"""Runs in CPython 3.15: replays TACH files to each of CPython's own formats, and prints how many samples each holds.

The words are files; one JSON object comes out, by file. A file that the format has nothing to say of has no samples.
"""
import contextlib
import io
import json
import marshal
import os
import re
import sys

from profiling.sampling.cli import main

FORMS = ["collapsed", "flamegraph", "gecko", "pstats"]


def collapsed(out):
    # Names stand there as they are, line breaks included.
    return sum(map(int, re.findall(r" (\d+)\n(?=tid:|\Z)", out.read().decode())))


def flamegraph(out):
    return int(re.search(r'EMBEDDED_DATA = \{.*?"value": (\d+)', out.read().decode()).group(1))


def gecko(out):
    return sum(len(thread["samples"]["stack"]) for thread in json.load(out)["threads"])


def pstats(out):
    # The first number of an entry counts the samples whose innermost frame it is.
    return sum(entry[0] for key, entry in marshal.load(out).items() if key != ("__sampled__",))


def total(form, file):
    out = file + "." + form
    # What `python -m profiling.sampling` runs.
    sys.argv = ["profiling.sampling", "replay", "--" + form, "-o", out, file]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main()
    if not os.path.exists(out):
        return 0
    with open(out, "rb") as written:
        count = globals()[form](written)
    os.remove(out)
    return count


print(json.dumps({file: {form: total(form, file) for form in FORMS} for file in sys.argv[1:]}))
