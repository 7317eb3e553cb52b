"""A program that has more children at once than a small table of processes holds, and then a few that work."""
import os
import signal
import sys
import time

import handshake

handshake.ready()
sys.stdin.readline()
crowd = []
for _ in range(100):
    child = os.fork()
    if child == 0:
        signal.pause()
    crowd.append(child)
time.sleep(1)
for child in crowd:
    os.kill(child, signal.SIGKILL)
for child in crowd:
    os.waitpid(child, 0)
# A process leaves the tables when the kernel frees its `task_struct`, a moment later.
time.sleep(2)
workers = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        handshake.spin(0.5)
        os._exit(0)
    workers.append(child)
for child in workers:
    os.waitpid(child, 0)
print(" ".join(map(str, workers)), flush=True)
handshake.until_closed()
