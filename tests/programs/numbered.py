"""Work that numbers itself: function `step_N` runs for some milliseconds of CPU time, then `step_N+1`, and never again.

A sample says which step it met, so one that is missing, or that stands in two files, shows in the numbers.
"""

import sys
import time

from handshake import ready

MILLISECONDS = float(sys.argv[1])


def steps():
    number = 0
    while True:
        source = f"""
def step_{number}(until):
    while time.thread_time() < until:
        sum(range(500))
"""
        names = {"time": time}
        exec(compile(source, f"/steps/{number // 100}.py", "exec"), names)
        yield names[f"step_{number}"]
        number += 1


ready()
for step in steps():
    step(time.thread_time() + MILLISECONDS / 1000)
