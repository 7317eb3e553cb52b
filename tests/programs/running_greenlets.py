"""Greenlets that run by turns, each in functions that say which one it is, below parents that are known beforehand.

A tower: greenlets each of which has begun the next one and waits for it; the innermost burns, then lets the main one go on. Its functions
end with its number. There are towers in two threads; one has more parents than are followed. Argument: for how many milliseconds each burns
at a time; then `asyncio`: the main greenlets are in a task each.
"""
import asyncio
import sys
import threading
import time

import greenlet
import handshake

BURN_S = float(sys.argv[1]) / 1000

FUNCTIONS = """
def burn_N():
    end = time.perf_counter() + BURN_S
    while time.perf_counter() < end:
        sum(range(20))


def inner_N():
    while True:
        burn_N()
        mains[N].switch()


def outer_N(more):
    if more:
        Worker(outer_N).switch(more - 1)
    else:
        tops[N] = Named(inner_N, NAME) if NAME else Worker(inner_N)
        tops[N].switch()
"""


class Worker(greenlet.greenlet):
    """Has no name of its own."""


class Named(greenlet.greenlet):
    """Has one, among other attributes."""

    def __init__(self, function, name):
        super().__init__(function)
        self.nam, self.names, self.namf = "short", "long", "other"
        self.name, self.last = name, 1


# A name may have one, two or four bytes per character.
NAMES = {0: "t\u00f6wer", 1: "", 2: "\u4e2d\u6587", 3: "\U0001f600 smile", 4: "plain", 5: ""}
DEPTHS = {3: 1, 4: 12}
mains, tops = {}, {}
for number, name in NAMES.items():
    source = FUNCTIONS.replace("_N", f"_{number}").replace("[N]", f"[{number}]").replace("NAME", repr(name))
    exec(compile(source, __file__, "exec"), globals())


def begin(number):
    mains[number] = greenlet.getcurrent()
    greenlet.greenlet(globals()[f"outer_{number}"]).switch(DEPTHS.get(number, 0))


def loop(numbers):
    for number in numbers:
        begin(number)
    begun.release()
    while True:
        for number in numbers:
            tops[number].switch()


async def in_task(numbers):
    loop(numbers)


def thread(numbers):
    if sys.argv[2:] == ["asyncio"]:
        asyncio.run(in_task(numbers))
    else:
        loop(numbers)


def tell():
    for _ in range(2):
        begun.acquire()
    towers = [{"name": NAMES[at] or "Worker", "id": id(tops[at]), "depth": DEPTHS.get(at, 0)} for at in sorted(NAMES)]
    handshake.ready(towers=towers)


begun = threading.Semaphore(0)
threading.Thread(target=tell, daemon=True).start()
threading.Thread(target=thread, args=([3, 4, 5],), daemon=True).start()
thread([0, 1, 2])
