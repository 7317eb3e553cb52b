"""Where the objects of an asyncio program lie, told by the program itself, which then waits in a task that runs.

Tasks: `main` runs; `first` and `second` both await `shared`; `second` alone awaited `alone` before; `lonely` awaits a plain
future; `unnamed` has no name of its own. `orphan` was made in a thread that has ended.
"""
import asyncio
import sys
import threading

import handshake


async def forever(awaitable):
    await awaitable


def facts(task):
    return {"at": id(task), "coro": id(task.get_coro()), "name": id(task.get_name())}


def make_orphan():
    """A task that outlives its thread: it is pending, and so is its loop."""
    loop = asyncio.new_event_loop()
    orphans.append((loop, loop.create_task(forever(loop.create_future()), name="orphan")))


async def main():
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    tasks = {}

    def start(name, awaitable):
        tasks[name] = asyncio.create_task(forever(awaitable), name=name)
        return tasks[name]

    shared = start("shared", asyncio.sleep(3600))
    start("first", shared)
    start("second", shared)
    start("waiter", start("alone", asyncio.sleep(3600)))
    start("lonely", future)
    unnamed = asyncio.create_task(forever(asyncio.sleep(3600)))
    thread = threading.Thread(target=make_orphan)
    thread.start()
    thread.join()
    for _ in range(3):
        await asyncio.sleep(0)
    current = asyncio.current_task()
    current.set_name("main")
    tasks["main"] = current
    handshake.ready(
        tasks={name: facts(task) for name, task in tasks.items()},
        unnamed=id(unnamed),
        orphan=id(orphans[0][1]),
        future=id(future),
        loop=id(loop),
        running=id(current),
        ident=threading.get_ident(),
    )
    sys.stdin.readline()


orphans = []
asyncio.run(main())
