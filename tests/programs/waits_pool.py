"""A pool of four threads that want one thing: `gil`, to run, or `lock`, one lock that each holds for 2 ms."""
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import handshake

LOCK = threading.Lock()


def encode(number):
    """Wants the GIL all the time."""
    while True:
        for step in range(1000):
            number += step


def update(_number):
    """Wants the lock most of the time."""
    while True:
        with LOCK:
            handshake.spin(0.002)


with ThreadPoolExecutor(4) as pool:
    tasks = pool.map(encode if sys.argv[1] == "gil" else update, range(4))
    handshake.ready()
    next(tasks)
