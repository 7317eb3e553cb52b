"""Runs in CPython 3.15: its own writer and reader of TACH files, by their CPU time. Prints one JSON object.

`write KIND COUNT FILE` writes samples of 30 frames: `repeated` always the same stack, `changing` nearly always another
one, by chance of 1,000 stacks of four threads that differ in their innermost 1 to 12 frames. What is written is made
before the clock starts. `read FILE` replays a file.
"""
import json
import os
import sys
import time

import _remote_debugging as remote

DEPTH, STACKS, THREADS, START_US = 30, 1000, 4, 1_000_000


def frame(name, line):
    location = remote.LocationInfo((line, line, 8, 8 + line % 40))
    return remote.FrameInfo(("/srv/app/module%d.py" % (line % 9), location, name, None))


def stacks():
    base = [frame("caller%d" % level, 10 + level) for level in range(DEPTH)]
    for number in range(STACKS):
        changed = 1 + number % 12
        own = [frame("function%d" % (number * 7 % 61), 100 + (number * 31 + level) % 400) for level in range(changed)]
        yield own + base[changed:]


def samples(kind):
    """Lists as the writer takes them, one for each distinct (thread, stack)."""
    def shown(thread, stack):
        return [remote.InterpreterInfo((0, [remote.ThreadInfo((4000 + thread, 35, stack))]))]
    if kind == "repeated":
        return [shown(0, next(stacks()))]
    return [shown(number % THREADS, stack) for number, stack in enumerate(stacks())]


def write(kind, count, path):
    known = samples(kind)
    order, times, dice, now = [], [], 1, START_US
    for _ in range(count):
        # The constants of C's own example of rand().
        dice = (dice * 1103515245 + 12345) % 2**31
        now += 900 + (dice >> 7) % 200
        order.append(known[(dice >> 8) % len(known)])
        times.append(now)
    begin = time.process_time()
    writer = remote.BinaryWriter(path, 1000, START_US, compression=1)
    for sample, now in zip(order, times):
        writer.write_sample(sample, now)
    writer.finalize()
    return {"seconds": time.process_time() - begin, "samples": count, "bytes": os.path.getsize(path)}


class Nothing:
    def collect(self, interpreters, timestamps):
        pass


def read(path):
    begin = time.process_time()
    with remote.BinaryReader(path) as reader:
        count = reader.replay(Nothing())
    return {"seconds": time.process_time() - begin, "samples": count, "bytes": os.path.getsize(path)}


verb, *words = sys.argv[1:]
print(json.dumps(read(words[0]) if verb == "read" else write(words[0], int(words[1]), words[2])))
