"""One OS thread that works by turns in the main interpreter and in a sub-interpreter."""
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters

import handshake

SUB = interpreters.create()
SUB = getattr(SUB, "id", SUB)

DEFINE = """
import time
def sub_outer():
    sub_inner()
def sub_inner():
    end = time.thread_time() + 0.01
    while time.thread_time() < end:
        pass
"""


def run(script):
    interpreters.run_string(SUB, script)


def main_outer():
    main_inner()


def main_inner():
    handshake.spin(0.01)


run(DEFINE)
handshake.ready(sub=int(SUB))
while True:
    main_outer()
    run("sub_outer()")
