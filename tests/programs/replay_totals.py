"""Runs in CPython 3.15: replays a TACH file to each of CPython's own formats, and prints how many samples each holds."""
import json
import marshal
import os
import re
import subprocess
import sys

file = sys.argv[1]


def replayed(form):
    out = file + "." + form
    line = [sys.executable, "-X", "utf8", "-m", "profiling.sampling", "replay", "--" + form, "-o", out, file]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    return out


def text(form):
    with open(replayed(form), encoding="utf-8") as out:
        return out.read()


totals = {}
totals["collapsed"] = sum(int(line.rsplit(" ", 1)[1]) for line in text("collapsed").splitlines())
totals["flamegraph"] = int(re.search(r'EMBEDDED_DATA = \{.*?"value": (\d+)', text("flamegraph")).group(1))
gecko = json.loads(text("gecko"))
totals["gecko"] = sum(len(thread["samples"]["stack"]) for thread in gecko["threads"])
with open(replayed("pstats"), "rb") as out:
    # The first number of an entry counts the samples whose innermost frame it is.
    totals["pstats"] = sum(entry[0] for key, entry in marshal.load(out).items() if key != ("__sampled__",))
for form in totals:
    os.remove(file + "." + form)
print(json.dumps(totals))
