"""A master that waits, with two forked children that work all the time."""
import os

import handshake

children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        handshake.signal.alarm(120)
        while True:
            pass
    children.append(child)
handshake.ready(children=children)
handshake.until_closed()
for child in children:
    os.kill(child, 9)
