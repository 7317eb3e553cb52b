"""An asyncio program of which each task burns in a function of its own, so that a sample's function tells whose work it is.

Before it burns for the first time a task tells its name and, by asyncio's own books (3.14), who awaits it: name by name, and of several
the one with the least id, as the profiler has to choose. Each of two threads has a loop of its own; with `uvloop`, uvloop's.
"""
import asyncio
import sys
import threading
import time

import handshake

truth = {}
lock = threading.Lock()


def chain_of(task):
    """Names of those that await a task, nearest first; futures between them have none."""
    names = []
    while True:
        waiters = getattr(task, "_asyncio_awaited_by", None)
        if not waiters:
            return names
        task = min(waiters, key=id)
        if isinstance(task, asyncio.Task):
            names.append(task.get_name())


def make(key):
    """A function that burns, named after its key: so much CPU time, or the one that waits for the GIL meanwhile would hardly run."""
    name = f"burn_{key}"
    code = f"def {name}(seconds):\n    end = clock() + seconds\n    while clock() < end:\n        pass\n"
    namespace = {"clock": time.thread_time}
    exec(code, namespace)
    return namespace[name]


async def pause():
    await asyncio.sleep(0)


async def deeper(depth):
    if depth:
        await deeper(depth - 1)
    else:
        await pause()


async def work(key, depth=0):
    burn = make(key)
    # Whoever awaits this task has to begin to.
    for _ in range(3):
        await pause()
    task = asyncio.current_task()
    with lock:
        truth[burn.__name__] = [task.get_name(), chain_of(task)]
    while True:
        burn(0.005)
        await deeper(depth)


def eager(key):
    """A task that runs at once, within the one that makes it."""
    burn = make(key)

    async def first():
        burn(0.005)

    loop = asyncio.get_running_loop()
    task = asyncio.Task(first(), loop=loop, name=f"eager {key}", eager_start=True)
    return burn, task


async def makes_eager_tasks(key):
    if sys.version_info < (3, 12):
        await gathers(f"{key}_no")
    for _ in range(3):
        await pause()
    outer = make(f"{key}_outer")
    mine = asyncio.current_task()
    with lock:
        truth[outer.__name__] = [mine.get_name(), chain_of(mine)]
        truth[f"burn_{key}"] = [f"eager {key}", []]
    while True:
        outer(0.005)
        eager(key)
        await pause()


async def gathers(key):
    await asyncio.gather(
        asyncio.create_task(work(f"{key}_one"), name=f"{key} one"), asyncio.create_task(work(f"{key}_two"), name="")
    )


async def shields(key):
    await asyncio.shield(asyncio.create_task(work(key), name="sh\u00e9ltered \u4e2d\U0001f600"))


async def groups(key):
    if not hasattr(asyncio, "TaskGroup"):
        await gathers(f"{key}_no")
    async with asyncio.TaskGroup() as group:
        group.create_task(work(f"{key}_named"), name="in a \n group \u20ac")
        group.create_task(work(f"{key}_numbered"))


async def waits_for(task):
    await task


async def awaited_by_two(key):
    shared = asyncio.create_task(work(key), name="shared")
    await asyncio.gather(*(asyncio.create_task(waits_for(shared), name=f"waits {n}") for n in range(2)))


async def nested(key, levels):
    """A chain of tasks that is longer than what is followed."""
    if levels == 0:
        await work(key)
    await asyncio.create_task(nested(key, levels - 1), name=f"level {levels}")


async def awaits_deeper(key, depth):
    if depth:
        await awaits_deeper(key, depth - 1)
    else:
        await asyncio.create_task(work(key), name="child")


async def awaits_deep(key):
    """More coroutines of a task that awaits than are followed."""
    await awaits_deeper(key, 20)


async def main(which):
    tasks = [
        asyncio.create_task(gathers(f"{which}_gather"), name="gathers"),
        asyncio.create_task(shields(f"{which}_shield"), name="shields"),
        asyncio.create_task(groups(f"{which}_group"), name="groups"),
        asyncio.create_task(awaited_by_two(f"{which}_two"), name="two"),
        asyncio.create_task(nested(f"{which}_nested", 11), name="nested"),
        asyncio.create_task(work(f"{which}_deep", depth=30), name="deep"),
        asyncio.create_task(makes_eager_tasks(f"{which}_eager"), name="makes"),
        asyncio.create_task(work(f"{which}_long"), name="n" * 100),
        asyncio.create_task(work(f"{which}_alone")),
        asyncio.create_task(awaits_deep(f"{which}_awaits"), name="awaits"),
    ]
    await asyncio.gather(*tasks)


def run(which):
    if "uvloop" in sys.argv:
        import uvloop

        uvloop.run(main(which))
    else:
        asyncio.run(main(which))


def sleeps():
    time.sleep(0.02)


async def blocks():
    """Holds up its loop, as no task should."""
    while True:
        sleeps()
        await pause()


if __name__ == "__main__":
    if sys.argv[1:] == ["sleeps"]:

        async def blocks_alone():
            task = asyncio.create_task(blocks(), name="blocks")
            await pause()
            handshake.ready()
            await task

        asyncio.run(blocks_alone())
    loops = 2
    other = threading.Thread(target=run, args=("b",), daemon=True)
    other.start()

    def tell():
        while True:
            with lock:
                count = len(truth)
            if count == loops * 13:
                break
            time.sleep(0.01)
        handshake.ready(truth=truth)

    threading.Thread(target=tell, daemon=True).start()
    run("a")
