"""Notes what a program can notice of a profiler: signals that arrive, its signal masks, its tracer, interrupted sleeps.

It prints them after a second of work and sleeps, and ends with status 7.
"""
import signal
import sys
import time

import handshake

arrived = []
for number in sorted(set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGALRM}):
    signal.signal(number, lambda number, frame: arrived.append(number))


def status(*names):
    with open("/proc/self/status", encoding="ascii") as lines:
        fields = dict(line.rstrip("\n").split(":\t", 1) for line in lines)
    return {name: fields[name].strip() for name in names}


handshake.ready()
input()
tracers = set()
for _ in range(50):
    handshake.spin(0.01)
    time.sleep(0.01)
    tracers.add(status("TracerPid")["TracerPid"])
print(sorted(tracers), arrived, status("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd", "Seccomp", "NoNewPrivs"))
print("to standard error", file=sys.stderr)
sys.exit(7)
