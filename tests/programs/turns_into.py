"""A program that becomes more than it was when it was first looked at, once the test says so.

Arguments: what becomes of it. `greenlet`: it imports greenlet and burns in one. `exec PATH`: it executes the interpreter at that path, which
burns.
"""
import os
import select
import sys

import handshake

BURN = """
import time
def after(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
"""


def before():
    """Burns until the test has spoken."""
    while not select.select([0], [], [], 0)[0]:
        handshake.spin(0.01)


what, *words = sys.argv[1:]
handshake.ready()
before()
if what == "greenlet":
    import greenlet

    names = {}
    exec(compile(BURN, "<burns>", "exec"), names)
    greenlet.greenlet(names["after"]).switch(1.5)
else:
    os.execv(words[0], [words[0], "-S", "-c", BURN + "after(1.5)"])
