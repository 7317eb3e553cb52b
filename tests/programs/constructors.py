"""Makes objects whose `__init__` works: from 3.13 on the evaluator runs a frame of its own between caller and `__init__`."""
import time

import handshake


class Item:
    def __init__(self):
        end = time.thread_time() + 0.001
        while time.thread_time() < end:
            pass


def making():
    for _ in range(100):
        Item()


def turns():
    while True:
        making()


making()
handshake.ready()
turns()
