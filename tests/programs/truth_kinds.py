"""The kinds of work of `truth.py`: functions that are called again and again, each time along the same ways.

Whatever the interpreter calls wherever it stands (finalizers, signal handlers, callbacks of weak references and of tracing) has
a name in ANYWHERE. Work that needs a newer interpreter is made of text, and does less on older ones.
"""
import asyncio
import contextvars
import functools
import gc
import json
import re
import signal
import sys
import weakref

ANYWHERE = {"_Finalized.__del__", "__del__", "forgotten", "on_signal", "on_line", "on_profile"}

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


def fail_and_recover(depth):
    try:
        fail(depth)
    except ValueError as error:
        half(error.args[0])


# Deep recursion.
def deeper(depth):
    if depth == 0:
        return key_of(depth)
    return half(deeper(depth - 1)) + half(depth)


def recursion():
    deeper(60)


# As deep as an interpreter goes without being asked: close to the frames that one sample has.
def straight(depth):
    if depth:
        return straight(depth - 1)
    return sum(map(key_of, NUMBERS[:6]))


def limit():
    straight(900)


# asyncio: coroutines that wait for each other.
async def awaited(number):
    half(number)
    await asyncio.sleep(0)
    return key_of(number)


async def gathered():
    return half(sum(await asyncio.gather(awaited(1), awaited(2), awaited(3))))


LOOP = asyncio.new_event_loop()


def tasks():
    LOOP.run_until_complete(gathered())


# Coroutines without a loop: asynchronous generators, context managers and comprehensions.
class Pause:
    def __await__(self):
        try:
            yield half(1)
        except ValueError:
            half(2)


class Managed:
    async def __aenter__(self):
        return half(1)

    async def __aexit__(self, kind, value, traceback):
        await Pause()


async def numbers(count):
    try:
        for value in range(count):
            await Pause()
            yield half(value)
    finally:
        half(count)


async def consumer():
    async with Managed():
        total = [half(value) async for value in numbers(3)]
    async for value in numbers(2):
        total.append(key_of(value))
    return half(sum(total))


async def caught():
    await Pause()
    return key_of(3)


def coroutines():
    running = consumer()
    try:
        while True:
            running.send(None)
    except StopIteration as stop:
        half(stop.value)


# Exceptions thrown through coroutines that await others, and such coroutines closed.
def throws():
    running = caught()
    running.send(None)
    try:
        running.throw(ValueError(1))
    except StopIteration as stop:
        half(stop.value)
    running = caught()
    running.send(None)
    running.close()


# What C calls by itself: attributes, operators, construction, copying, contexts.
class Made:
    def __init__(self, value):
        self.value = half(value)

    def __getattr__(self, name):
        return half(len(name))

    @property
    def twice(self):
        return self.value + half(self.value)

    def __eq__(self, other):
        return half(self.value) == half(other.value)

    def __hash__(self):
        return half(self.value)

    def __getitem__(self, index):
        return half(index)

    def __len__(self):
        return half(8)

    def __bool__(self):
        return bool(half(2))

    def __call__(self, *values, **named):
        return half(len(values) + len(named))

    def __repr__(self):
        return "Made(%d)" % half(self.value)

    def __add__(self, other):
        return Made(self.value + other.value)


class Derived(Made):
    def __init__(self, value):
        super().__init__(half(value))

    @classmethod
    def of(cls, value):
        return cls(half(value))


VARIABLE = contextvars.ContextVar("variable")


def in_context(value):
    VARIABLE.set(half(value))
    return half(VARIABLE.get())


def spread(*values, **named):
    return half(len(values)) + half(len(named))


def objects():
    one, other = Made(6), Derived.of(24)
    half(one.missing + one.twice + one[3] + len(one))
    {one: half(1)}.get(other)
    if one == other:
        half(2)
    if one:
        half(repr([one, other]).count("M"))
    spread(*[1, 2, 3], **{"a": one(1, 2, c=3)})
    contextvars.Context().run(contextvars.copy_context().run, in_context, 6)
    json.dumps([one, other], default=lambda made: half(made.value))
    (one + other).twice


# C within Python within C.
def nested_key(depth):
    if depth == 0:
        return half(depth)
    return sorted(map(nested_key, [depth - 1, depth - 1]), key=key_of)[0]


def nested():
    nested_key(5)
    max([3, 1, 2], key=lambda value: functools.reduce(lambda one, other: half(one + other), [value, 1, 2]))


# Objects that end: by their last reference, by the collector, while an exception is on its way; generators that are closed so.
class _Finalized:
    def __init__(self):
        self.itself = None

    def __del__(self):
        half(key_of(3))


def forgotten(reference):
    half(4)


def abandoned():
    running = averaging()
    next(running)
    raise ValueError(running)


def ending():
    _Finalized()
    kept = _Finalized()
    kept.itself = kept
    reference = weakref.ref(_Finalized(), forgotten)
    half(reference is None)
    del kept
    try:
        abandoned()
    except ValueError:
        half(5)
    for _ in range(20):
        _Finalized().itself = [half(1)]
    gc.collect(0)


# Signal handlers: sent by the program to itself, and by a timer.
def on_signal(number, frame):
    half(key_of(number))


def signals():
    signal.signal(signal.SIGALRM, on_signal)
    signal.signal(signal.SIGUSR1, on_signal)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    for value in range(20):
        key_of(value)
    signal.raise_signal(signal.SIGUSR1)
    deeper(8)


# A profile function, and what is told of lines (3.12): Python that the interpreter calls between two instructions.
def on_profile(frame, event, argument):
    half(3)


def on_line(code, line):
    half(4)


def watched(value):
    total = half(value)
    total += half(total)
    return total


def watch_lines():
    monitoring = sys.monitoring
    monitoring.use_tool_id(3, "truth")
    monitoring.register_callback(3, monitoring.events.LINE, on_line)
    monitoring.set_local_events(3, watched.__code__, monitoring.events.LINE)


if hasattr(sys, "monitoring"):
    watch_lines()


def monitored():
    # Nothing traces what is called by a callback: here it is.
    on_line(None, 1)
    for value in range(30):
        watched(value)


def profiled():
    on_profile(None, None, None)
    sys.setprofile(on_profile)
    for value in range(10):
        key_of(value)
    sorted(NUMBERS[:10], key=half)
    sys.setprofile(None)


# Groups of exceptions (3.11).
GROUPS = """
def split(values):
    try:
        raise ExceptionGroup("several", [ValueError(half(value)) if value % 2 else KeyError(value) for value in values])
    except* ValueError as group:
        half(len(group.exceptions))
    except* KeyError as group:
        half(group.exceptions[0].args[0])
"""


def groups():
    split(range(6))
    try:
        fail(3)
    except ValueError as error:
        try:
            raise KeyError(half(3)) from error
        except KeyError as caught:
            half(caught.args[0])


def split(values):
    half(len(values))


if sys.version_info >= (3, 11):
    names = {"half": half}
    exec(compile(GROUPS, "groups.py", "exec"), names)
    split = names["split"]


# Frames of many sizes: the same place of a thread's stack of frames holds one that another function calls each time.
PADDED = "def padded_{0}(call):\n    {1}return call(1)\n"
BETWEEN = "def between_{0}(call):\n    {1}return padded_0(call)\n"
RESUMED = "def resumed_{0}(call):\n    {1}for value in calling(call):\n        half(value)\n    return call(2)\n"


def of_size(template, number):
    names = {"half": half, "calling": calling}
    if template is BETWEEN:
        names["padded_0"] = PADDINGS[0]
    text = template.format(number, "".join("v%d = " % place for place in range(number)) + ("0\n    " if number else ""))
    exec(compile(text, "sizes.py", "exec"), names)
    return next(value for name, value in names.items() if name.startswith(template[4:11]))


def calling(call):
    yield call(3)
    yield call(4)


PADDINGS = [of_size(PADDED, number) for number in range(24)]
BETWEENS = [of_size(BETWEEN, number) for number in range(0, 16, 2)]
RESUMES = [of_size(RESUMED, number) for number in range(0, 24, 4)]


def sizes():
    for function in PADDINGS:
        function(half)
    for function in BETWEENS:
        function(half)
    for function in RESUMES:
        function(key_of)


# A little of everything: short enough to be followed instruction by instruction.
def short_generators():
    for value in delegated(3):
        half(value)
    average = averaging()
    next(average)
    average.send(2)
    average.close()
    sum(half(value) for value in counted(2))


def short_callbacks():
    sorted([3, 1, 2], key=key_of)
    list(map(half, [1, 2]))


def steps():
    short_callbacks()
    short_generators()
    fail_and_recover(2)
    coroutines()
    throws()
    objects()
    nested_key(2)
    deeper(4)
    for function in PADDINGS[::3]:
        function(half)
    for function in BETWEENS[::2]:
        function(half)
    for function in RESUMES[::3]:
        function(key_of)


# Greenlets: each with a stack of its own, which ends at its first function; by turns, one in another, and with an exception.
def switching(number):
    trace_here()
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


if "greenlets" in sys.argv:
    import greenlet
    from truth_trace import trace_here

KINDS = {
    kind.__name__: kind
    for kind in (
        callbacks, generated, generators, exceptions, recursion, limit, tasks, coroutines, throws, objects, nested, ending, signals,
        monitored, profiled, groups, sizes, steps, greenlets,
    )
}
