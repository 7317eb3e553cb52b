"""What every program here does with the test that runs it: says that it is ready, and what is to be seen in it.

The program prints one line of JSON and then works until it is killed. What a stack must look like it asks its own
interpreter (frame objects and `co_positions`), so the tests hold no line numbers.
"""
import dis
import json
import os
import signal
import sys
import threading
import time


def ready(**facts):
    """Tells the test that it may begin. Whatever happens to the test, the program ends after two minutes, or as many seconds as it says."""
    signal.alarm(int(os.environ.get("TACHYON_TEST_SECONDS", "120")))
    print(json.dumps(dict(facts, pid=os.getpid(), tid=threading.get_native_id())), flush=True)


def spin(seconds):
    """Uses `seconds` of this thread's CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def name_of(code):
    """What a code object is called: its qualified name where there is one (3.11)."""
    return getattr(code, "co_qualname", code.co_name)


def positions(code):
    """Every place where a frame of this code can be: [line, end line, column, end column], -1 unknown.

    A frame that has run nothing yet is at its first line. Up to 3.10 there are only lines.
    """
    if hasattr(code, "co_positions"):
        found = {tuple(-1 if part is None else part for part in place) for place in code.co_positions()}
    else:
        found = {(line, line, -1, -1) for _, line in dis.findlinestarts(code)}
    return sorted(found | {(code.co_firstlineno, code.co_firstlineno, -1, -1)})


def place_of(frame):
    """Where a frame is."""
    if hasattr(frame.f_code, "co_positions"):
        place = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        return [-1 if part is None else part for part in place]
    return [frame.f_lineno, frame.f_lineno, -1, -1]


def leaf_of(code):
    """A function that may be the innermost one, with every place it can be at."""
    return {"function": name_of(code), "filename": code.co_filename, "positions": positions(code)}


def stack_of(frame):
    """The frames that called `frame`, innermost first, as [function, file, line, end line, column, end column].

    Below them, under `leaf`, the frame itself: with all places it can be at.
    """
    leaf = leaf_of(frame.f_code)
    callers = []
    frame = frame.f_back
    while frame is not None:
        code = frame.f_code
        callers.append([name_of(code), code.co_filename] + place_of(frame))
        frame = frame.f_back
    return {"leaf": leaf, "callers": callers}


def until_closed():
    """Waits, without using the CPU, until the test closes our standard input."""
    sys.stdin.read()
