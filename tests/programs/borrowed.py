"""A thread runs Python with a thread state that another thread has made; the maker works beside it.

Its argument says how: `state LIBRARY` with `PyThreadState_New` (programs/borrowed.c), or `interpreter` with a
sub-interpreter, whose first thread state is its maker's (up to 3.12 whoever runs code in it takes that one). With `idle`
as its last word the maker sleeps instead.

Each side works by turns with the GIL and without it, in functions that bear its name.
"""
import ctypes
import random
import sys
import threading
import time

import handshake

DEFINE = """
import hashlib, random, time
BUFFER = bytes(1_000_000)
def {0}_held():
    end = time.thread_time() + random.uniform(0.001, 0.004)
    while time.thread_time() < end:
        pass
def {0}_released():
    hashlib.sha256(memoryview(BUFFER)[:random.randrange(300_000, len(BUFFER))])
def {0}_turns():
    while True:
        {0}_held()
        {0}_released()
"""
BORROWER = []


def borrower_main():
    BORROWER.append(threading.get_native_id())
    borrower_turns()


def start_with_state(library):
    ctypes.PyDLL(library).start(ctypes.py_object(borrower_main))


def start_with_interpreter():
    try:
        import _interpreters as interpreters
    except ImportError:
        import _xxsubinterpreters as interpreters
    made = interpreters.create()
    made = getattr(made, "id", made)

    def borrowing():
        BORROWER.append(threading.get_native_id())
        interpreters.run_string(made, DEFINE.format("borrower") + "borrower_turns()")

    threading.Thread(target=borrowing, daemon=True).start()


exec(compile(DEFINE.format("borrower"), "borrower.py", "exec"))
exec(compile(DEFINE.format("maker"), "maker.py", "exec"))
if sys.argv[1] == "state":
    start_with_state(sys.argv[2])
else:
    start_with_interpreter()
while not BORROWER:
    time.sleep(0.01)
handshake.ready(borrower=BORROWER[0])
if sys.argv[-1] == "idle":
    while True:
        time.sleep(0.001)
maker_turns()
