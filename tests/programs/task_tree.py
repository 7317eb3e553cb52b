"""Tasks of many shapes, told by the program itself: names, coroutines at the place where they await, who awaits whom.

The main thread's loop has all shapes; two more threads have a loop each. The loops stand still: the main one in a task that
runs and waits for the test, the others in their selectors.

Arguments: `many N` makes N tasks that wait and nothing else; `cycle` makes two tasks that await each other; `plain` leaves out what
CPython's own tools stumble over: names that are not short ASCII, further loops, what is no coroutine.
"""
import asyncio
import sys
import threading

import handshake

NAMES = ["zażółć 日本", "bell\x07 \x1b[31mred\x1b[0m\nnew line", "\udcff surrogate", "", "<task>", "x" * 300, 17]


async def leaf(seconds=3600):
    await asyncio.sleep(seconds)


async def nested(depth):
    if depth:
        await nested(depth - 1)
    else:
        await leaf()


async def awaits(task):
    await task


async def group():
    async with asyncio.TaskGroup() as tasks:
        for number in range(3):
            tasks.create_task(leaf(), name=f"in group {number}")


async def times():
    await asyncio.wait_for(asyncio.create_task(leaf(), name="timed"), 3600)


async def gathers_twice():
    await asyncio.gather(asyncio.gather(asyncio.create_task(leaf(), name="gathered twice")))


async def gathers():
    await asyncio.gather(leaf(), asyncio.create_task(nested(2), name="gathered task"))


async def shields(task):
    await asyncio.shield(task)


async def generates():
    yield 1
    await leaf()
    yield 2


async def iterates():
    async for _ in generates():
        pass


class Awaitable:
    def __await__(self):
        yield from asyncio.sleep(3600).__await__()


async def waits_for_generator():
    await Awaitable()


async def many_waiters(shared):
    await asyncio.wait([shared])


def stack_of(task):
    """A task's coroutines, innermost first, as far as a program can look into them."""
    awaiter, found = task.get_coro(), []
    while awaiter is not None:
        for frame, awaited in (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await")):
            if hasattr(awaiter, frame):
                place = getattr(awaiter, frame)
                found.append([handshake.name_of(place.f_code), place.f_code.co_filename, place.f_lineno])
                awaiter = getattr(awaiter, awaited)
                break
        else:
            break
    return found[::-1]


def name_of(task):
    """Its name, as text that a JSON file can hold."""
    return task.get_name().encode("utf-8", "backslashreplace").decode()


# Who awaits whom, by name, where the program cannot ask (before 3.14).
AWAITED_BY = {
    **{f"in group {number}": ["group"] for number in range(3)},
    "gathered task": ["gathers"],
    "gathered twice": ["gathers twice"],
    "timed": ["times"],
    "shielded": ["shields"],
    "shared": ["sharer 0", "sharer 1", "sharer 2", "waits"],
    NAMES[0]: ["middle"],
    "middle": ["outer"],
    "one 0": ["one waiter"],
    "one waiter": ["one main"],
    "two 0": ["two waiter"],
    "two waiter": ["two main"],
}


def awaiters(task, tasks):
    """Tasks that await one."""
    if hasattr(task, "_asyncio_awaited_by"):
        return task._asyncio_awaited_by or ()
    # The only task without a name that does no more than this.
    unnamed = task.get_name().startswith("Task-") and task.get_coro().__name__ == "leaf"
    names = ["gathers"] if unnamed else AWAITED_BY.get(task.get_name(), ())
    return [waiter for waiter in tasks if waiter.get_name() in names]


def told(task, tid, loop, tasks):
    awaited_by = sorted(id(waiter) for waiter in awaiters(task, tasks))
    return {
        "id": id(task),
        "name": name_of(task),
        "tid": tid,
        "loop": id(loop),
        "awaited_by": awaited_by,
        "stack": stack_of(task),
    }


class Elsewhere(threading.Thread):
    """A loop in a thread of its own, idle once its tasks wait."""

    def __init__(self, name):
        super().__init__(name=name, daemon=True)
        self.ready = threading.Event()

    def run(self):
        asyncio.run(self.main())

    async def main(self):
        self.loop = asyncio.get_running_loop()
        asyncio.current_task().set_name(f"{self.name} main")
        self.tasks = [asyncio.create_task(nested(1), name=f"{self.name} {number}") for number in range(2)]
        waiter = asyncio.create_task(awaits(self.tasks[0]), name=f"{self.name} waiter")
        self.loop.call_later(0.2, self.ready.set)
        await waiter


def current_stack(root):
    """The running task's stack, from the caller of this function to the task's coroutine."""
    frame, found = sys._getframe(1), []
    while True:
        found.append([handshake.name_of(frame.f_code), frame.f_code.co_filename, frame.f_lineno])
        if frame.f_code is root:
            return found
        frame = frame.f_back


def tell_and_wait(loops, root):
    """Says what there is, and waits for the test where it says it does."""
    current = asyncio.current_task()
    found = [(task, tid, loop) for tid, loop in loops for task in asyncio.all_tasks(loop) if task is not current]
    tasks = [told(*each, [task for task, _, _ in found]) for each in found]
    listener = sys.stdin
    facts = dict(tasks=tasks, running=id(current), main_loop=id(loops[0][1]), name=name_of(current))
    # The line on which it waits, and the frames that called it.
    line = sys._getframe().f_lineno + 3
    facts["stack"] = [["tell_and_wait", __file__, line]] + current_stack(root)[1:]
    handshake.ready(**facts)
    listener.readline()


async def every_shape():
    loop = asyncio.get_running_loop()
    plain = sys.argv[1:2] == ["plain"]
    kept = [asyncio.create_task(leaf(), name=name) for name in (["first", 17] if plain else NAMES)]
    kept += [asyncio.create_task(nested(5))]
    if hasattr(asyncio, "TaskGroup"):
        kept += [asyncio.create_task(group(), name="group")]
    kept += [asyncio.create_task(gathers(), name="gathers")]
    kept += [asyncio.create_task(gathers_twice(), name="gathers twice")]
    kept += [asyncio.create_task(times(), name="times")]
    shielded = asyncio.create_task(leaf(), name="shielded")
    kept += [shielded, asyncio.create_task(shields(shielded), name="shields")]
    shared = asyncio.create_task(leaf(), name="shared")
    kept += [shared] + [asyncio.create_task(awaits(shared), name=f"sharer {number}") for number in range(3)]
    kept += [asyncio.create_task(many_waiters(shared), name="waits")]
    kept += [asyncio.create_task(awaits(kept[0]), name="middle")]
    kept += [asyncio.create_task(awaits(kept[-1]), name="outer")]
    if hasattr(asyncio, "eager_task_factory"):
        loop.set_task_factory(asyncio.eager_task_factory)
        kept += [asyncio.create_task(nested(3), name="eager")]
        loop.set_task_factory(None)
    if not plain:
        kept += [asyncio.create_task(iterates(), name="iterates")]
        kept += [asyncio.create_task(waits_for_generator(), name="generator")]
    if sys.argv[1:2] == ["cycle"]:
        pair = []
        pair += [asyncio.create_task(in_circle(pair, 1), name="first of a pair")]
        pair += [asyncio.create_task(in_circle(pair, 0), name="second of a pair")]
        kept += pair
    for _ in range(4):
        await asyncio.sleep(0)
    # One that has not started.
    kept.append(asyncio.create_task(leaf(), name="new"))
    others = [Elsewhere(name) for name in (() if plain else ("one", "two"))]
    for other in others:
        other.start()
    for other in others:
        other.ready.wait()
    loops = [(threading.get_native_id(), loop)] + [(other.native_id, other.loop) for other in others]
    tell_and_wait(loops, every_shape.__code__)


async def in_circle(pair, other):
    await pair[other]


async def many(count):
    kept = [asyncio.create_task(leaf(), name=f"number {number}") for number in range(count)]
    await asyncio.sleep(0.1)
    tell_and_wait([(threading.get_native_id(), asyncio.get_running_loop())], many.__code__)
    del kept


if sys.argv[1:2] == ["many"]:
    asyncio.run(many(int(sys.argv[2])))
else:
    asyncio.run(every_shape())
