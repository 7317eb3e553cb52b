"""Two asyncio tasks that take 75 and 25 % of the CPU time, by the thread's own CPU clock, and a third one that awaits both."""
import asyncio
from time import thread_time

import handshake


def burn(seconds):
    end = thread_time() + seconds
    while thread_time() < end:
        pass


async def fetch():
    while True:
        burn(0.006)
        await asyncio.sleep(0)


async def render():
    while True:
        burn(0.002)
        await asyncio.sleep(0)


async def serve():
    asyncio.current_task().set_name("serve")
    tasks = [asyncio.create_task(fetch(), name="fetch"), asyncio.create_task(render(), name="render")]
    handshake.ready()
    await asyncio.gather(*tasks)


asyncio.run(serve())
