"""Threads that sleep, that work, and that come and go; how long those that have gone lived is told at the end."""
import json
import sys
import threading
import time

import handshake


def sleeps():
    while True:
        time.sleep(0.05)


def works():
    while True:
        handshake.spin(0.01)
        time.sleep(0.02)


def visits(stays):
    time.sleep(stays)


ENDED = [0, 0.0]


def receives():
    while True:
        begin = time.monotonic()
        visitor = threading.Thread(target=visits, args=(0.03,))
        visitor.start()
        visitor.join()
        ENDED[0] += 1
        ENDED[1] += time.monotonic() - begin


for target in (sleeps, sleeps, works, receives):
    threading.Thread(target=target, daemon=True).start()
handshake.ready()
for _ in sys.stdin:
    print(json.dumps({"visitors": ENDED[0], "lived_s": ENDED[1], "now_s": time.monotonic()}), flush=True)
