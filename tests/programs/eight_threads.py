"""Eight threads, each in a stack of its own: function `worker_N` calls itself N times."""
import sys
import threading
import time

import handshake

COUNT = 8
stacks = {}
past_barrier = []
all_there = threading.Barrier(COUNT + 1)


def leaf(name):
    stacks[threading.get_native_id()] = handshake.stack_of(sys._getframe())
    all_there.wait()
    past_barrier.append(name)
    while True:
        pass


def worker(depth, name):
    leaf(name) if depth == 0 else worker(depth - 1, name)


for index in range(COUNT):
    threading.Thread(target=worker, args=(index, "worker %d" % index), daemon=True).start()
all_there.wait()
# A recording begins at once, and would meet those that are still on their way out of the barrier.
while len(past_barrier) < COUNT:
    time.sleep(0.001)
handshake.ready(stacks=list(stacks.values()), threads={str(tid): index for index, tid in enumerate(stacks)})
handshake.until_closed()
