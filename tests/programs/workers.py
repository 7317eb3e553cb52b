"""200 forked workers, eight at a time, all in the functions that they have from their parent."""
import os

import handshake

WORKERS = 200
DEPTH = 12

call = handshake.spin
for number in range(DEPTH):
    names = {"call": call}
    exec("def shared_%d(seconds):\n    call(seconds)\n" % number, names)
    call = names["shared_%d" % number]

handshake.ready(workers=WORKERS)
input()
running = 0
for _ in range(WORKERS):
    if os.fork() == 0:
        call(0.01)
        os._exit(0)
    running += 1
    if running == 8:
        os.wait()
        running -= 1
while running:
    os.wait()
    running -= 1
print("done", flush=True)
handshake.until_closed()
