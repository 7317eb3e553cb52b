"""asyncio programs whose tasks wait at places that are known beforehand, while the loop has something to do now and then.

Two loops in two threads, and one that was stopped. `still` tasks await something that never comes, `moves` awaits two things by turns, 2 : 3; a parent awaits
its children. `busy` takes the first loop's thread for three tenths of the time. The loops are asyncio's, uvloop's (`uvloop`), or such as do not
say which thread runs them (`silent`).
"""
import asyncio
import sys
import threading
import time

import handshake


async def never(event):
    await event.wait()


async def still(event):
    await never(event)


async def short():
    await asyncio.sleep(0.2)


async def long():
    await asyncio.sleep(0.3)


async def moves():
    while True:
        await short()
        await long()


async def busy():
    while True:
        end = time.thread_time() + 0.03
        while time.thread_time() < end:
            pass
        await asyncio.sleep(0.07)


async def parent():
    children = [asyncio.ensure_future(still(asyncio.Event())) for _ in range(3)]
    for number, child in enumerate(children):
        child.set_name("child-%d" % number)
    await asyncio.gather(*children)


def named(coroutine, name):
    task = asyncio.ensure_future(coroutine)
    task.set_name(name)
    return task


async def first_loop(begun):
    tasks = [named(moves(), "m\u00f6ves"), named(parent(), "parent"), named(busy(), "busy"), named(still(asyncio.Event()), "alone")]
    asyncio.current_task().set_name("main")
    await asyncio.sleep(0.05)
    begun.set()
    await asyncio.gather(*tasks)


async def second_loop(begun):
    asyncio.current_task().set_name("second")
    begun.set()
    await never(asyncio.Event())


def stopped_loop():
    """Leaves a task behind in a loop that nobody runs any more."""
    left = []

    async def leaves():
        left.append(named(still(asyncio.Event()), "left"))
        await asyncio.sleep(0.05)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leaves())
    threading.Event().wait()


def make_loops_silent():
    """They keep their thread where nobody looks for it, as loops do that are written in C."""

    class Silent(asyncio.SelectorEventLoop):
        threads = {}

        @property
        def _thread_id(self):
            return self.threads.get(id(self))

        @_thread_id.setter
        def _thread_id(self, ident):
            self.threads[id(self)] = ident

    class Policy(asyncio.DefaultEventLoopPolicy):
        def new_event_loop(self):
            return Silent()

    asyncio.set_event_loop_policy(Policy())


tids = {}


def run(name, main):
    begun = threading.Event()

    def body():
        tids[name] = threading.get_native_id()
        asyncio.run(main(begun))

    threading.Thread(target=body, daemon=True).start()
    begun.wait()


if __name__ == "__main__":
    if "uvloop" in sys.argv:
        import uvloop

        uvloop.install()
    if "silent" in sys.argv:
        make_loops_silent()
    run("first", first_loop)
    run("second", second_loop)
    threading.Thread(target=stopped_loop, daemon=True).start()
    time.sleep(0.3)
    handshake.ready(tids=tids)
    threading.Event().wait()
