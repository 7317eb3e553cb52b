"""As many forked processes as it is told, each busy in one function; the parent waits.

They give way to everybody else: the profiler shall get to its start beside all of them.
"""
import os
import sys

import handshake


def busy():
    while True:
        pass


def child():
    os.nice(19)
    busy()
    os._exit(0)


children = []
for _ in range(int(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        handshake.signal.alarm(120)
        child()
    children.append(pid)
handshake.ready(children=children)
os.wait()
