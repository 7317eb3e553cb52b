"""Pools of four workers by one of `multiprocessing`'s ways to start them: fork, forkserver, spawn.

Writes the workers' pids into the file named by the second argument.
"""
import multiprocessing
import os
import signal
import sys
import time


def busy(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def begin(barrier):
    barrier.wait()


def work(_number):
    busy(0.05)
    return os.getpid()


def main(method, path):
    signal.alarm(120)
    context = multiprocessing.get_context(method)
    # No worker takes a task before all are there.
    barrier = context.Barrier(4)
    with context.Pool(4, begin, (barrier,)) as pool:
        pids = pool.map(work, range(80), chunksize=1)
    with open(path, "w") as file:
        file.write("\n".join(str(pid) for pid in sorted(set(pids))))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
