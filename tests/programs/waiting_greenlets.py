"""Greenlets that wait at places that are known beforehand, in two threads with a hub each.

`still` ones wait for something that never comes, `moves` waits at two places by turns, 2 : 3, and others stand where stacks are hard to
follow: below a C function, deep, in a greenlet that another one has begun. Some have not begun, or have ended. Arguments: whose the hub
is, `gevent`, `eventlet`, or else our own; `many N` makes so many further objects that the garbage collector knows; with
`untracked` it does not know the first thread's main greenlet.
"""
import ctypes
import heapq
import sys
import threading
import time

import greenlet
import handshake

hubs = threading.local()


class Hub(greenlet.greenlet):
    """Sleeps until a timer is due, and goes on with the greenlet that waits for it."""

    def __init__(self):
        super().__init__()
        self.timers = []

    def run(self):
        while True:
            if self.timers:
                due, _, waiter = heapq.heappop(self.timers)
                time.sleep(max(0, due - time.monotonic()))
                waiter.switch()
            else:
                time.sleep(3600)


def hub():
    if not hasattr(hubs, "hub"):
        hubs.hub = Hub()
    return hubs.hub


def own_sleep(seconds):
    here = hub()
    heapq.heappush(here.timers, (time.monotonic() + seconds, id(greenlet.getcurrent()), greenlet.getcurrent()))
    here.switch()


def own_spawn(function, *arguments):
    made = Named(lambda: function(*arguments), hub())
    heapq.heappush(hub().timers, (0, id(made), made))
    return made


class Named(greenlet.greenlet):
    """gevent's greenlets have names, too."""


def of(kind):
    """How to spawn a greenlet, how it sleeps, and how it waits for ever."""
    if kind == "gevent":
        import gevent

        return gevent.spawn, gevent.sleep, lambda: gevent.get_hub().switch()
    if kind == "eventlet":
        import eventlet
        import eventlet.hubs

        return eventlet.spawn, eventlet.sleep, lambda: eventlet.hubs.get_hub().switch()
    return own_spawn, own_sleep, lambda: hub().switch()


spawn, sleep, wait = of(sys.argv[1] if len(sys.argv) > 1 else "")


def never():
    wait()


def still():
    never()


def short():
    sleep(0.2)


def long():
    sleep(0.3)


def moves():
    while True:
        short()
        long()


def busy():
    while True:
        handshake.spin(0.03)
        sleep(0.07)


def by_key(_):
    never()


def in_c():
    sorted([1], key=by_key)


def deep(more):
    if more:
        deep(more - 1)
    else:
        never()


def begins():
    greenlet.greenlet(still).switch()


def ends():
    pass


#: What each greenlet's own functions are while it waits, innermost first.
SHAPES = {
    "still": (still, [], ["never", "still"]),
    "in_c": (in_c, [], ["never", "by_key", "in_c"]),
    "deep": (deep, [60], ["never"] + 61 * ["deep"]),
    "n\u00f6n-ASCII \u65e5": (still, [], ["never", "still"]),
}

told, kept, tids = {}, [], {}


def named(name, function, *arguments):
    made = spawn(function, *arguments)
    made.name = name
    return made


def first_thread(begun):
    if "untracked" in sys.argv:
        # As if the collector were moving the thread's main greenlet whenever somebody looks for it.
        ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(greenlet.getcurrent()))
    for name, (function, arguments, functions) in SHAPES.items():
        made = named(name, function, *arguments)
        kept.append(made)
        told[id(made)] = {"name": name, "functions": functions}
    for function in [moves, busy]:
        made = named(function.__name__, function)
        kept.append(made)
        told[id(made)] = {"name": function.__name__, "functions": None}
    kept.extend([spawn(ends), greenlet.greenlet(still)])
    nest(begun)


def nest(begun):
    """A greenlet that has begun another one, which waits."""

    def child():
        kept.append(greenlet.getcurrent())
        told[id(greenlet.getcurrent())] = {"name": "greenlet", "functions": ["never", "still", "child"]}
        still()

    def parent():
        greenlet.greenlet(child).switch()

    outer = named("outer", parent)
    kept.append(outer)
    told[id(outer)] = {"name": "outer", "functions": ["parent"]}
    sleep(0.1)
    begun.set()
    never()


def second_thread(begun):
    made = named("second", still)
    # A hub that nothing could ever wake ends its thread, gevent's.
    kept.extend([made, named("sleeper", sleep, 3600)])
    told[id(made)] = {"name": "second", "functions": ["never", "still"]}
    sleep(0.1)
    begun.set()
    never()


def run(name, body):
    begun = threading.Event()

    def main():
        tids[name] = threading.get_native_id()
        body(begun)

    threading.Thread(target=main, daemon=True).start()
    begun.wait()


if __name__ == "__main__":
    if "many" in sys.argv:
        kept.append([[number] for number in range(int(sys.argv[sys.argv.index("many") + 1]))])
    run("first", first_thread)
    run("second", second_thread)
    for made in kept:
        if id(made) in told:
            told[id(made)]["parent"] = id(made.parent)
    line = never.__code__.co_firstlineno + 1
    handshake.ready(tids=tids, greenlets={str(at): fact for at, fact in told.items()}, line=line)
    threading.Event().wait()
