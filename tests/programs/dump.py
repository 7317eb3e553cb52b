"""Threads with known stacks for `tachyon-bpf dump`: one sleeps, one is blocked, one runs, one never enters Python.

Obeys: `poke ADDRESS VALUE` writes a word into its own memory, for tests of targets
that lie. Lines that the test looks for end with a comment that names them.
"""
import struct
import sys
import threading
import time

import handshake

try:
    import ctypes
except ImportError:
    # A build without libffi, as musl's: then no thread is started behind Python's back.
    ctypes = None

DEPTH = 30


def deep(n, then):
    if n:
        deep(n - 1, then)  # recurses
    else:
        then()  # calls


def sleeper():
    time.sleep(3600)  # sleeps


def blocked():
    lock.acquire()  # blocks


def spinner():
    while True:  # spins
        pass  # spins too


def obey():
    for line in sys.stdin:  # waits
        _, address, value = line.split()
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(int(address))
            memory.write(struct.pack("=Q", int(value)))
        print("done", flush=True)


lock = threading.Lock()
lock.acquire()
threads = {}
for function, name in ((sleeper, "sleepy \u0142\xf3\u0144"), (blocked, "waiting for a lock"), (spinner, "busy")):
    threads[function.__name__] = thread = threading.Thread(target=deep, args=(DEPTH, function), name=name, daemon=True)
    thread.start()
if ctypes:
    libc = ctypes.CDLL(None)
    native = ctypes.c_void_p()
    libc.pthread_create(ctypes.byref(native), None, libc.pause, None)
time.sleep(0.3)
handshake.ready(
    ident={name: thread.ident for name, thread in threads.items()},
    tids={name: thread.native_id for name, thread in threads.items()},
    native=bool(ctypes),
    name_object=id(threads["sleeper"]._name),
    free_threaded=not getattr(sys, "_is_gil_enabled", lambda: True)(),
)
obey()  # obeys
