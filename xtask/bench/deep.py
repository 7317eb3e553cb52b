"""The benchmark's target: DEPTH frames deep, the innermost one working and counting for ever.

usage: deep.py DEPTH SWEEP_MIB COUNTER THROUGH_C [WHOSE]

Every frame runs a code object of its own. With a SWEEP_MIB the innermost frame also reads through that much memory
in each iteration, so that a sample finds cold caches. COUNTER is a file of 8 bytes in which the iterations done so
far stand, little endian. THROUGH_C of the frames are called by C code. Ends when its parent does.

WHOSE work it is: `task:N` runs it in an asyncio task that N others await, one another; `loop` in an asyncio loop and in no task;
`span` in a span of ddtrace, `traced` in one that ddtrace does not publish. `greenlet:N` runs it in a greenlet with N parents beside the
main one, `named:N` in one with a name of its own; `greenlets` in the main one. The frames that this takes are of the DEPTH. `pipe`: the
innermost frame does not compute but sends a byte to a child, which sends it back, and counts the ways there and back. `pauses`: the
innermost frame works a tenth of the time, 10 ms at a time, and counts how often.
"""

import mmap
import os
import sys

depth, sweep_mib, counter_path, through_c = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
whose, _, awaiting = "".join(sys.argv[5:6]).partition(":")
memory = bytes(sweep_mib << 20)
parent = os.getppid()
with open(counter_path, "r+b") as file:
    counter = mmap.mmap(file.fileno(), 8)


def leaf(_=0):
    done = 0
    while done & 0xFFFF or os.getppid() == parent:
        total = 0
        for i in range(200):
            total += i & 7
        if memory:
            memory.count(b"\xff")
        done += 1
        counter[0:8] = done.to_bytes(8, "little")


def chain():
    """What calls the frames that are lacking to its caller's, `leaf` the last of them."""
    lacking, frame = depth, sys._getframe(1)
    while frame:
        lacking, frame = lacking - 1, frame.f_back
    call = leaf
    for number in range(lacking - 1):
        scope = {"callee": call}
        how = "max((0,), key=callee)" if number < through_c else "callee()"
        exec(f"def level_{number}(_=0):\n    return {how}\n", scope)
        call = scope[f"level_{number}"]
    return call


if whose == "task":
    import asyncio

    async def work():
        chain()()

    async def awaits(others):
        await (asyncio.create_task(awaits(others - 1)) if others else asyncio.create_task(work()))

    asyncio.run(awaits(int(awaiting) - 1) if int(awaiting) else work())
elif whose == "loop":
    import asyncio

    def callback():
        chain()()

    loop = asyncio.new_event_loop()
    loop.call_soon(callback)
    loop.run_forever()
elif whose in ("span", "traced"):
    os.environ.update(
        DD_TRACE_OTEL_CTX_ENABLED="true" if whose == "span" else "false",
        DD_INSTRUMENTATION_TELEMETRY_ENABLED="false",
        DD_REMOTE_CONFIGURATION_ENABLED="false",
        DD_TRACE_ENABLED="true",
    )
    from ddtrace.trace import tracer

    with tracer.trace("work"):
        chain()()
elif whose in ("greenlet", "named"):
    import greenlet

    class Named(greenlet.greenlet):
        """Its instances can have attributes."""

    def begin(parents):
        if parents:
            Named(begin).switch(parents - 1)
        else:
            made = Named(lambda: chain()())
            if whose == "named":
                made.name = "work"
            made.switch()

    begin(int(awaiting))
elif whose == "greenlets":
    import greenlet

    greenlet.getcurrent()
    chain()()
elif whose == "pipe":
    (asked, ask), (answered, answer) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(ask)
        os.close(answered)
        while os.read(asked, 1):
            os.write(answer, b"!")
        os._exit(0)
    os.close(asked)
    os.close(answer)

    def leaf(_=0):
        done = 0
        while done & 0xFFF or os.getppid() == parent:
            os.write(ask, b"?")
            os.read(answered, 1)
            done += 1
            counter[0:8] = done.to_bytes(8, "little")

    chain()()
elif whose == "pauses":
    import time

    def leaf(_=0):
        done = 0
        while os.getppid() == parent:
            end = time.monotonic() + 0.01
            while time.monotonic() < end:
                pass
            done += 1
            counter[0:8] = done.to_bytes(8, "little")
            time.sleep(0.09)

    chain()()
else:
    chain()()
