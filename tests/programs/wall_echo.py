"""Two processes, each on a CPU of its own, send each other a byte again and again: waits of some microseconds, each of them ended by the other
CPU, and both CPUs idle while theirs waits."""
import os
import socket

import handshake

ours, theirs = socket.socketpair()
cpus = sorted(os.sched_getaffinity(0))


def asks():
    ours.send(b"?")
    ours.recv(1)


def answers():
    while theirs.recv(1):
        theirs.send(b"!")


child = os.fork()
os.sched_setaffinity(0, {cpus[0 if child else -1]})
if not child:
    ours.close()
    try:
        answers()
    except OSError:
        pass  # The other one was killed.
    os._exit(0)
theirs.close()
handshake.ready(child=child)
while True:
    asks()
