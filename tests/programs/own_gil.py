"""Two sub-interpreters that have a GIL each (3.12), each kept busy by a thread of its own; the main thread sleeps."""
import threading

import handshake

try:
    import _interpreters as interpreters
    ISOLATED = ("isolated",)
except ImportError:
    import _xxsubinterpreters as interpreters
    ISOLATED = ()

COUNT = 2
CODE = """
def outer_{id}():
    inner_{id}()
def inner_{id}():
    while True:
        pass
outer_{id}()
"""
owned = {}
all_there = threading.Barrier(COUNT + 1)


def run():
    # 3.12's are isolated unless told otherwise.
    kept = interpreters.create(*ISOLATED)
    sub = int(getattr(kept, "id", kept))
    owned[threading.get_native_id()] = sub
    all_there.wait()
    interpreters.run_string(sub, CODE.format(id=sub))


for _ in range(COUNT):
    threading.Thread(target=run, daemon=True).start()
all_there.wait()
handshake.ready(interpreters={str(tid): sub for tid, sub in owned.items()})
handshake.until_closed()
