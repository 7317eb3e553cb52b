"""An asyncio program: three tasks, each awaiting a chain of coroutines of its own depth, that take turns."""
import asyncio
import sys

import handshake

TASKS = 3
stacks = {}


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
    handshake.ready(stacks=list(stacks.values()), below=handshake.leaf_of(handshake.spin.__code__))
    await asyncio.gather(*tasks)


asyncio.run(main())
