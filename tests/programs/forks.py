"""Forks as fast as it can: each child works for a moment and ends."""
import os

import handshake

CHILDREN = 1000

handshake.ready()
input()
for _ in range(CHILDREN):
    if (pid := os.fork()) == 0:
        for _ in range(2000):
            pass
        os._exit(0)
    os.waitpid(pid, 0)
print("done", flush=True)
handshake.until_closed()
