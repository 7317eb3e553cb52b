"""Runs in CPython 3.15: writes down what its own reader makes of a TACH file, one line a sample.

The first use of a frame is a line `frame N [...]`, that of a stack a line `stack N [frames]`; numbers count first uses,
so two readers that agree write the same bytes.
"""
import json
import sys

import _remote_debugging


class Writer:
    def __init__(self, out):
        self.out, self.frames, self.stacks = out, {}, {}

    def number(self, table, kind, key, shown):
        number = table.get(key)
        if number is None:
            number = table[key] = len(table)
            self.out.write("%s %d %s\n" % (kind, number, json.dumps(shown)))
        return number

    def frame(self, frame):
        location = None if frame.location is None else tuple(frame.location)
        key = (frame.filename, frame.funcname, location, frame.opcode)
        return self.number(self.frames, "frame", key, key)

    def collect(self, interpreters, timestamps):
        for interpreter in interpreters:
            for thread in interpreter.threads:
                frames = tuple(map(self.frame, thread.frame_info))
                stack = self.number(self.stacks, "stack", frames, frames)
                for timestamp in timestamps:
                    sample = (thread.thread_id, interpreter.interpreter_id, timestamp, thread.status, stack)
                    self.out.write("sample %d %d %d %d %d\n" % sample)


with open(sys.argv[2], "w", encoding="utf-8", errors="surrogatepass") as out:
    with _remote_debugging.BinaryReader(sys.argv[1]) as reader:
        info = reader.get_info()
        replayed = reader.replay(Writer(out))
    print(json.dumps({"replayed": replayed, "info": info}))
