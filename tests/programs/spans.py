"""Threads that work, each inside of spans of its own, as ddtrace makes and publishes them; a thread that works in none.

Told when it is ready: of each thread its native id, its identity (on x86-64 its thread pointer), the ids of its trace, and the
Python function that is at the root of its work (`thread_N`). Within it, a thread is by turns in its outer span (function
`in_outer`) and in a short inner one (function `in_inner`).

After a line of input it stops, and tells when each span was the current one: of each thread a list of
[from, to, span id], nanoseconds of CLOCK_MONOTONIC, where the edges are left out: what is between two is of either.

`tasks` instead of `threads`: the same with tasks of asyncio in one thread, each in a span, which change with each other while they are in it.
"""

import asyncio
import json
import os
import sys
import threading
import time

os.environ.update(
    DD_TRACE_OTEL_CTX_ENABLED="true", DD_INSTRUMENTATION_TELEMETRY_ENABLED="false",
    DD_REMOTE_CONFIGURATION_ENABLED="false", DD_SERVICE="shop", DD_VERSION="1.2.3", DD_ENV="tests")

from ddtrace.trace import TraceFilter, tracer  # noqa: E402

WORKERS = 4
stop = threading.Event()
logs = [[] for _ in range(WORKERS)]
told = [None] * (WORKERS + 1)


class Drop(TraceFilter):
    """Nothing is sent anywhere."""

    def process_trace(self, trace):
        return None


def work(milliseconds):
    until, sum = time.perf_counter_ns() + milliseconds * 1_000_000, 0
    while time.perf_counter_ns() < until:
        sum += len(str(until))
    return sum


def in_outer(milliseconds):
    return work(milliseconds)


def in_inner(milliseconds):
    return work(milliseconds)


def ids(span, number):
    return {"tid": threading.get_native_id(), "ident": threading.get_ident(), "function": f"thread_{number}",
            "trace_id": f"{span.trace_id:032x}" if span else None, "span_id": f"{span.span_id:016x}" if span else None}


def logged(number, span, function, milliseconds):
    began = time.monotonic_ns()
    function(milliseconds)
    logs[number].append([began, time.monotonic_ns(), f"{span.span_id:016x}"])


def thread(number):
    with tracer.trace("outer") as outer:
        told[number] = ids(outer, number)
        while not stop.is_set():
            logged(number, outer, in_outer, 7)
            with tracer.trace("inner") as inner:
                logged(number, inner, in_inner, 5)


def without():
    told[WORKERS] = ids(None, WORKERS)
    while not stop.is_set():
        work(5)


async def task(number):
    with tracer.trace("outer") as outer:
        told[number] = ids(outer, number)
        while not stop.is_set():
            logged(number, outer, in_outer, 7)
            await asyncio.sleep(0)
            with tracer.trace("inner") as inner:
                logged(number, inner, in_inner, 5)
                await asyncio.sleep(0)


async def tasks():
    await asyncio.gather(*(task(number) for number in range(WORKERS)))


# Each is a function with a name of its own, by which samples tell the threads apart.
def named(number, target, *arguments):
    scope = {"target": target, "arguments": arguments}
    exec(f"def thread_{number}():\n    target(*arguments)\n", scope)
    return threading.Thread(target=scope[f"thread_{number}"])


tracer.configure(trace_processors=[Drop()])
if sys.argv[1] == "threads":
    threads = [named(number, thread, number) for number in range(WORKERS)]
else:
    threads = [named(0, lambda: asyncio.run(tasks()))]
threads.append(named(WORKERS, without))
for each in threads:
    each.start()
while None in told:
    time.sleep(0.01)
print(json.dumps({"pid": os.getpid(), "service": "shop", "version": "1.2.3", "threads": told}), flush=True)
sys.stdin.readline()
stop.set()
for each in threads:
    each.join()
print(json.dumps(logs), flush=True)
