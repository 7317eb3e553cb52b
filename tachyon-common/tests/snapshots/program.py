"""Threads with stacks of several shapes, which they tell themselves: what `cargo xtask snapshots` records.

A thread tells its stack on the line that it then stays on. It prints one line of JSON for all.
"""

import _thread
import dis
import json
import sys
import time

THREADS = []
READY = _thread.allocate_lock()


def told(frame):
    """The stack from this frame on, as CPython itself sees it."""
    frames = []
    while frame is not None:
        code = frame.f_code
        starts = list(dis.findlinestarts(code))
        ends = [start for start, _ in starts[1:]] + [len(code.co_code)]
        frames.append(
            {
                "name": getattr(code, "co_qualname", code.co_name),
                "file": code.co_filename,
                "line": frame.f_lineno,
                "firstlineno": code.co_firstlineno,
                "lasti": frame.f_lasti,
                # The instructions of that line: the innermost frame goes on within them.
                "spans": [[start, end] for (start, line), end in zip(starts, ends) if line == frame.f_lineno],
            }
        )
        frame = frame.f_back
    return frames


def tell(frame, main=False):
    THREADS.append({"tid": _thread.get_native_id(), "main": main, "frames": told(frame)})


def publish(frame):
    tell(frame, main=True)
    print(json.dumps({"threads": THREADS}), flush=True)
    return True


def sleeps():
    tell(sys._getframe()); READY.release(); time.sleep(3600)


def descends(depth):
    if depth:
        descends(depth - 1)
    else:
        sleeps()


async def inner():
    sleeps()


async def outer():
    await inner()


def runs_a_coroutine():
    outer().send(None)


# Names of one byte a character that are not ASCII, and of two.
def größe():
    done = False
    while done or publish(sys._getframe()): done = True


def π(_):
    größe()


class Shape:
    def method(self):
        def nested():
            for _ in self.generator():
                pass

        nested()

    def generator(self):
        # C calls the function.
        yield sorted([1], key=lambda item: π(item))

    @classmethod
    def of_the_class(cls):
        cls().method()


def main():
    for work in (lambda: descends(12), runs_a_coroutine):
        READY.acquire()
        _thread.start_new_thread(work, ())
    # Released when the last one has told.
    READY.acquire()
    Shape.of_the_class()


main()
