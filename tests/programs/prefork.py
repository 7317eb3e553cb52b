"""A master that waits and four forked workers that work. A worker lives half a second and is replaced by a new one."""
import os
import time

import handshake

WORKERS = 4


def handle():
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        handshake.spin(0.01)


def worker_main():
    handle()
    os._exit(0)


def master():
    handshake.ready()
    workers = 0
    while True:
        if os.fork() == 0:
            worker_main()
        workers += 1
        if workers >= WORKERS:
            os.wait()


master()
