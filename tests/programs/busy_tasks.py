"""An event loop that never rests: five tasks start twenty others all the time and gather them, while ten sleep."""
import asyncio

import handshake


async def short(turns):
    for _ in range(turns):
        await asyncio.sleep(0)


async def works(number):
    while True:
        await asyncio.gather(*[asyncio.create_task(short(turns), name=f"short {number}") for turns in range(20)])


async def sleeps():
    await asyncio.sleep(3600)


async def main():
    tasks = [asyncio.create_task(sleeps(), name=f"sleeper {number}") for number in range(10)]
    tasks += [asyncio.create_task(works(number), name=f"worker {number}") for number in range(5)]
    await asyncio.sleep(0.01)
    handshake.ready()
    await asyncio.gather(*tasks)


asyncio.run(main())
