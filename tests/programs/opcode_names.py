"""Runs in CPython 3.15: how its viewers name the opcodes of a TACH file: [function, opcode, name, general name]."""
import json
import sys

import _remote_debugging
from profiling.sampling import opcode_utils


class Collector:
    def __init__(self):
        self.found = set()

    def collect(self, interpreters, timestamps):
        for interpreter in interpreters:
            for thread in interpreter.threads:
                for frame in thread.frame_info:
                    self.found.add((frame.funcname, frame.opcode))


collector = Collector()
with _remote_debugging.BinaryReader(sys.argv[1]) as reader:
    reader.replay(collector)
named = []
for function, opcode in sorted(collector.found, key=repr):
    if opcode is not None:
        info = opcode_utils.get_opcode_info(opcode)
        named.append([function, opcode, info["opname"], info["base_opname"]])
print(json.dumps(named))
