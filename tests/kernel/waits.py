"""Sleeps and works by turns for ever, in functions of their own, and says `ready`. Loads no module that is a file."""

import time


def sleeps():
    time.sleep(0.007)


def works():
    end = time.monotonic() + 0.003
    while time.monotonic() < end:
        pass


print("ready", flush=True)
while True:
    sleeps()
    works()
