"""Collects garbage by turns with other work: the collector has much to look at, and nothing to free."""
import gc

import handshake

KEPT = [[index] for index in range(400_000)]
gc.disable()


def collecting():
    gc.collect()


def working():
    handshake.spin(0.02)


def turns():
    while True:
        collecting()
        working()


handshake.ready()
turns()
