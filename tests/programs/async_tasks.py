"""An asyncio program: three tasks, each awaiting a chain of coroutines of its own depth, that take turns.

The event loop between them is a part of the picture: the program watches itself for some rounds and tells every stack it
meets there, so that a sample of the loop is judged as strictly as one of a task.
"""
import asyncio
import sys

import handshake

TASKS = 3
ROUNDS = 20
stacks = {}
between = {}


def watch(frame, event, _arg):
    """A profile function: takes down the stack of each call, once for each chain of callers."""
    if event == "call":
        key = [frame.f_code]
        caller = frame.f_back
        while caller is not None:
            key += [caller.f_code, caller.f_lasti]
            caller = caller.f_back
        if tuple(key) not in between:
            between[tuple(key)] = handshake.stack_of(frame)


def work(task):
    if task not in stacks:
        stacks[task] = handshake.stack_of(sys._getframe())
    handshake.spin(0.01)


async def deeper(task, depth):
    if depth:
        await deeper(task, depth - 1)
    else:
        work(task)
        await asyncio.sleep(0)


async def task_main(task):
    while True:
        await deeper(task, task)


async def main():
    tasks = [asyncio.ensure_future(task_main(task)) for task in range(TASKS)]
    while len(stacks) < TASKS:
        await asyncio.sleep(0)
    sys.setprofile(watch)
    for _ in range(ROUNDS):
        await asyncio.sleep(0)
    sys.setprofile(None)
    handshake.ready(
        stacks=list(stacks.values()),
        between=list(between.values()),
        below=handshake.leaf_of(handshake.spin.__code__),
    )
    await asyncio.gather(*tasks)


asyncio.run(main())
