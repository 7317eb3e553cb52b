"""Threads that want different shares of the processors, each in a function of its own, in slices of some milliseconds."""
import threading
import time

import handshake

SHARES = [0.1, 0.2, 0.4, 0.8]
STARTED = threading.Barrier(len(SHARES) + 1)


def work(share):
    TIDS[threading.get_native_id()] = share
    STARTED.wait()
    period = 0.00731 + share / 1000
    while True:
        handshake.spin(share * period)
        time.sleep((1 - share) * period)


TIDS = {}
for share in SHARES:
    threading.Thread(target=work, args=(share,), daemon=True).start()
STARTED.wait()
handshake.ready(threads=sorted(TIDS))
threading.Event().wait()
