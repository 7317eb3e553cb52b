"""Records its own truth, then runs free: every stack that its work has, told by a trace function, of each of its threads.

The arguments are kinds of work. `sys.settrace` looks at the first turns of all of them; then it is taken away, the program
says that it is ready, and the same turns go on at full speed from the same line. A thread's truth is a tree of callers:
`nodes` has [parent, function, line, end line, column, end column], numbered from 1 on, with 0 for the root; `leaves` has
[node, function]; `functions` has [name, file, lines, first line of a generator or coroutine, else 0]. A trace function is
not told when a generator is made, which its own frame does at its first line, called from where it is made.

`greenlets` needs that package, and `foreign=PATH` the library of `truth.c`, whose threads call Python. Their ids are in `foreign`.
"""
import asyncio
import functools
import inspect
import re
import sys
import threading

import handshake

# asyncio's ways differ a little from turn to turn.
TRACED_TURNS = 4


class Truth:
    def __init__(self):
        self.traced = True
        self.functions = {}
        self.nodes = {}
        self.leaves = set()
        self.places = {}
        self.lines = []
        self.first_lines = []

    def function(self, code):
        key = (handshake.name_of(code), code.co_filename)
        if key not in self.functions:
            self.functions[key] = len(self.functions)
            self.lines.append(set())
            is_generator = code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR)
            self.first_lines.append(code.co_firstlineno if is_generator else 0)
        index = self.functions[key]
        if code not in self.places:
            self.places[code] = {}
            self.lines[index].update(place[0] for place in handshake.positions(code))
        return index

    def place(self, frame):
        code, at = frame.f_code, frame.f_lasti
        function = self.function(code)
        if at not in self.places[code]:
            self.places[code][at] = tuple(handshake.place_of(frame))
        return (function,) + self.places[code][at]

    def note(self, frame):
        callers = []
        caller = frame.f_back
        while caller is not None:
            callers.append(self.place(caller))
            caller = caller.f_back
        node = 0
        for place in reversed(callers):
            node = self.nodes.setdefault((node,) + place, len(self.nodes) + 1)
        self.leaves.add((node, self.function(frame.f_code)))

    def tracer(self, frame, event, arg):
        self.note(frame)
        return self.tracer

    def trace(self):
        """Traces from here on: a greenlet, and a thread state that C code makes for each call, has its own trace function."""
        self.note(sys._getframe(1))
        sys.settrace(self.tracer)

    def told(self):
        return {
            "functions": [
                [name, file, sorted(self.lines[index]), self.first_lines[index]]
                for (name, file), index in self.functions.items()
            ],
            "nodes": list(self.nodes),
            "leaves": sorted(self.leaves),
        }


THREAD = threading.local()


def drive(work, traced):
    """Runs the work for ever; calls `traced` with the truth once it is known."""
    truth = THREAD.truth = Truth()
    turn = 0
    while True:
        if turn == 0:
            truth.trace()
        elif turn == TRACED_TURNS:
            sys.settrace(None)
            truth.traced = False
            traced(truth.told())
        for part in work:
            part()
        turn += 1


# Callbacks: C code that calls Python.
NUMBERS = [(index * 7919) % 1009 for index in range(60)]
PATTERN = re.compile(r"\w+")
TEXT = "one two three four five six seven " * 4


def half(value):
    return value // 2


def key_of(value):
    return half(value) + half(value + 1)


def compare(one, other):
    return (one > other) - (one < other)


def replace(match):
    return match.group().upper()


def callbacks():
    sorted(NUMBERS, key=key_of)
    sorted(NUMBERS, key=functools.cmp_to_key(compare))
    PATTERN.sub(replace, TEXT)
    functools.reduce(lambda one, other: half(one + other), NUMBERS)
    list(map(key_of, filter(half, NUMBERS)))


# Generated code: functions of one template, and ones made anew each time from the same code.
TEMPLATE = "def made_{0}(value):\n    total = 0\n    for step in range(value):\n        total += step * {0}\n    return total\n"


def make(number):
    names = {}
    exec(compile(TEMPLATE.format(number), "made_%d.py" % number, "exec"), names)
    return names["made_%d" % number]


MADE = [make(number) for number in range(8)]


def generated():
    for function in MADE:
        function(40)
    for shift in range(4):
        inner = lambda value: half(value) + shift
        inner(inner(shift))


# Generators: nested, sent to, closed.
def counted(number):
    for value in range(number):
        yield half(value)


def delegated(number):
    got = yield from counted(number)
    return got


def averaging():
    total = 0
    try:
        while True:
            total += half((yield total))
    finally:
        half(total)


def generators():
    sum(value + half(value) for value in delegated(25))
    for value in delegated(25):
        half(value)
    average = averaging()
    next(average)
    for value in range(10):
        average.send(value)
    average.close()


# Exceptions: through several frames, with handlers, `finally` and `with`.
class Guard:
    def __enter__(self):
        return half(3)

    def __exit__(self, kind, value, traceback):
        half(4)
        return kind is KeyError


GUARD = Guard()


def fail(depth):
    if depth:
        try:
            fail(depth - 1)
        finally:
            half(depth)
    else:
        raise ValueError(depth)


def exceptions():
    for depth in range(8):
        try:
            fail(depth)
        except ValueError as error:
            half(error.args[0])
        with GUARD:
            raise KeyError(depth)


# Deep recursion.
def deeper(depth):
    if depth == 0:
        return key_of(depth)
    return half(deeper(depth - 1)) + half(depth)


def recursion():
    deeper(60)


# asyncio: coroutines that wait for each other.
async def awaited(number):
    half(number)
    await asyncio.sleep(0)
    return key_of(number)


async def gathered():
    return half(sum(await asyncio.gather(awaited(1), awaited(2), awaited(3))))


def tasks():
    LOOP.run_until_complete(gathered())


# Greenlets: each with a stack of its own, which ends at its first function; by turns, one in another, and with an exception.
if "greenlets" in sys.argv:
    import greenlet


def switching(number):
    if THREAD.truth.traced:
        THREAD.truth.trace()
    for value in range(number):
        half(greenlet.getcurrent().parent.switch(busy(value)))
    if number > 10:
        nested = greenlet.greenlet(switching)
        nested.switch(number // 2)
        sorted(NUMBERS[:8], key=lambda value: half(value) + busy(nested.switch(value)))
    raise KeyError(number)


def busy(value):
    return sum(key_of(deeper(30)) for _ in range(20)) + value


def greenlets():
    for number in (10, 20):
        made = greenlet.greenlet(switching)
        made.switch(number)
        try:
            while True:
                half(busy(made.switch(number)))
        except KeyError as error:
            half(error.args[0])


KINDS = {kind.__name__: kind for kind in (callbacks, generated, generators, exceptions, recursion, tasks, greenlets)}


# Threads: each with functions of its own, under its own native id.
def first_of_threads():
    for value in NUMBERS:
        key_of(value)


def second_of_threads():
    deeper(20)
    sum(counted(20))


class Called:
    """What a thread of C calls again and again: the thread state, and what traces in it, is made anew each time."""

    def __init__(self, work):
        self.work = work
        self.truth = Truth()
        self.turn = 0

    def __call__(self):
        if self.turn < TRACED_TURNS:
            self.truth.trace()
        elif self.turn == TRACED_TURNS:
            sys.settrace(None)
            FOREIGN.append(threading.get_native_id())
            thread_knows(self.truth.told())
        self.turn += 1
        self.work()


def called():
    deeper(12)
    sorted(NUMBERS, key=key_of)


def called_too():
    fail_and_recover(6)
    sum(delegated(20))


def fail_and_recover(depth):
    try:
        fail(depth)
    except ValueError as error:
        half(error.args[0])


TRUTHS = {}
FOREIGN = []
LIBRARY = [word.partition("=")[2] for word in sys.argv if word.startswith("foreign=")]
THREADS = [first_of_threads, second_of_threads] if "threads" in sys.argv else []
CALLED = [Called(called), Called(called_too)] if LIBRARY else []
KNOWN = threading.Barrier(1 + len(THREADS) + len(CALLED))


def thread_knows(truth):
    TRUTHS[threading.get_native_id()] = truth
    KNOWN.wait()


def main_knows(truth):
    TRUTHS[threading.get_native_id()] = truth
    KNOWN.wait()
    handshake.ready(threads={str(tid): truth for tid, truth in TRUTHS.items()}, foreign=FOREIGN)


LOOP = asyncio.new_event_loop()
work = [KINDS[kind] for kind in sys.argv[1:] if kind in KINDS]
for function in THREADS:
    threading.Thread(target=drive, args=([function], thread_knows), daemon=True).start()
for function in CALLED:
    import ctypes

    library = ctypes.PyDLL(LIBRARY[0])
    library.start.argtypes = [ctypes.py_object]
    library.start(function)
drive(work or [callbacks], main_knows)
