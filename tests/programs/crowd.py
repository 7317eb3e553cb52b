"""2,000 threads that wait, more than one sample's search looks at. Every 200th of them works once, one after the other,
in a function that is compiled for it and named after its number."""
import threading

import handshake

COUNT = 2000
EVERY = 200

TEMPLATE = """
def crowd_{0}():
    spin(0.1)
"""


def wait(number):
    tids[number] = threading.get_native_id()
    there.release()
    if number % EVERY:
        gate.wait()
        return
    turns[number // EVERY].wait()
    names = {"spin": handshake.spin}
    exec(compile(TEMPLATE.format(number), "crowd_%d.py" % number, "exec"), names)
    names["crowd_%d" % number]()
    turns[number // EVERY + 1].set()
    gate.wait()


threading.stack_size(64 * 1024)
tids = {}
gate = threading.Event()
there = threading.Semaphore(0)
turns = [threading.Event() for _ in range(COUNT // EVERY + 1)]
for number in range(COUNT):
    threading.Thread(target=wait, args=(number,), daemon=True).start()
for _ in range(COUNT):
    there.acquire()
handshake.ready(threads={str(tids[number]): number for number in range(0, COUNT, EVERY)})
input()
turns[0].set()
turns[-1].wait()
handshake.spin(0.1)
print("done", flush=True)
handshake.until_closed()
