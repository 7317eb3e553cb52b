"""In step with a timer of 10 ms: `first` for 5 ms of the clock, `second` for the next 5, and so on, always at the same
moments of it."""

import time

import handshake

HALF_NS = 5_000_000


def first(end):
    while time.monotonic_ns() < end:
        pass


def second(end):
    while time.monotonic_ns() < end:
        pass


handshake.ready()
while True:
    half = time.monotonic_ns() // HALF_NS
    (second if half % 2 else first)((half + 1) * HALF_NS)
