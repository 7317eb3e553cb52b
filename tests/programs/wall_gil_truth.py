"""As many threads as asked for use the GIL in turns, and count how long each waits for it; no thread is made to give it back.

Tells the sum when it is asked.
"""
import ctypes
import json
import sys
import threading
import time

import handshake

LIBRARY = ctypes.PyDLL(sys.argv[1])
LIBRARY.gives_it_back.restype = ctypes.c_longlong
THREADS = int(sys.argv[2])
sys.setswitchinterval(100)
WAITED = [0] * THREADS


def works(number):
    while True:
        handshake.spin(0.001)
        WAITED[number] += LIBRARY.gives_it_back()


for number in range(THREADS):
    threading.Thread(target=works, args=(number,), daemon=True).start()
handshake.ready()
for _ in sys.stdin:
    print(json.dumps({"waited_s": sum(WAITED) / 1e9, "now_s": time.monotonic()}), flush=True)
