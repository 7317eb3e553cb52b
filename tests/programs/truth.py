"""Records its own truth, then runs free: every stack that its work has, told by a trace function, of each of its threads.

The arguments are kinds of work (`truth_kinds.py`). `sys.settrace` looks at the first turns of all of them (`truth_trace.py`); then it
is taken away, the program says that it is ready, and the same turns go on at full speed from the same line. A trace function is
not told when a generator is made, which its own frame does at its first line, called from where it is made.

`greenlets` needs that package. `foreign=PATH` is the library of `truth.c`, whose threads call Python; their ids are in `foreign`.
With `again=PATH` Python calls C that lets go of the GIL, takes it again and calls Python, several times deep. `interpreters` has two
interpreters besides, each run by a thread of its own.
"""
import os
import sys
import threading

import handshake
from truth_kinds import ANYWHERE, KINDS, NUMBERS, counted, deeper, delegated, fail_and_recover, key_of
from truth_trace import TRACED_TURNS, Truth, drive


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


# Interpreters: each runs this program's work in itself, and writes down what it knows.
IN_INTERPRETER = """
import sys
sys.path.insert(0, {path!r})
sys.argv = ["truth.py"]
import json
from truth_kinds import KINDS
from truth_trace import drive
def knows(truth):
    with open({output!r} + ".part", "w") as file:
        json.dump(truth, file)
    import os
    os.rename({output!r} + ".part", {output!r})
drive([KINDS[kind] for kind in {kinds!r}], knows)
"""


def run_interpreter(number, folder):
    try:
        import _interpreters as interpreters
        made = interpreters.create("isolated")
    except ImportError:
        import _xxsubinterpreters as interpreters
        made = interpreters.create()
    made = getattr(made, "id", made)
    output = os.path.join(folder, "%d.json" % number)
    kinds = [["callbacks", "recursion"], ["generators", "exceptions"]][number]
    OWNED[number] = (threading.get_native_id(), int(made), output)
    interpreters.run_string(made, IN_INTERPRETER.format(path=os.path.dirname(os.path.abspath(__file__)), output=output, kinds=kinds))


def truths_of_interpreters(folder):
    import json
    import time

    threads = [threading.Thread(target=run_interpreter, args=(number, folder), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    while len(OWNED) < 2 or not all(os.path.exists(output) for _, _, output in OWNED.values()):
        time.sleep(0.05)
    told = {}
    for tid, made, output in OWNED.values():
        with open(output) as file:
            told["%d/%d" % (tid, made)] = json.load(file)
    return told


TRUTHS = {}
OWNED = {}
FOREIGN = []


def word(name):
    return next((word.partition("=")[2] for word in sys.argv if word.startswith(name + "=")), None)


THREADS = [first_of_threads, second_of_threads] if "threads" in sys.argv else []
CALLED = [Called(called), Called(called_too)] if word("foreign") else []
KNOWN = threading.Barrier(1 + len(THREADS) + len(CALLED))


def thread_knows(truth):
    TRUTHS[threading.get_native_id()] = truth
    KNOWN.wait()


def main_knows(truth):
    TRUTHS[threading.get_native_id()] = truth
    KNOWN.wait()
    threads = {str(tid): truth for tid, truth in TRUTHS.items()}
    if word("interpreters"):
        threads.update(truths_of_interpreters(word("interpreters")))
    handshake.ready(threads=threads, foreign=FOREIGN, anywhere=sorted(ANYWHERE))


def call_nested(depth=6):
    if depth:
        NESTED.call_python_again(call_less, depth)
    return deeper(6)


def call_less(depth):
    return call_nested(depth - 1)


work = [KINDS[kind] for kind in sys.argv[1:] if kind in KINDS]
if word("again"):
    import ctypes

    NESTED = ctypes.CDLL(word("again"))
    NESTED.call_python_again.argtypes = [ctypes.py_object, ctypes.c_long]
    work.append(call_nested)
for function in THREADS:
    threading.Thread(target=drive, args=([function], thread_knows), daemon=True).start()
for function in CALLED:
    import ctypes

    library = ctypes.PyDLL(word("foreign"))
    library.start.argtypes = [ctypes.py_object]
    library.start(function)
drive(work or [KINDS["callbacks"]], main_knows)
