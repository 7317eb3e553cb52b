"""Makes new functions as long as it runs, each with a long name of its own, and runs each for two milliseconds.

What such a program costs a profiler grows with every function.
"""

import json
import sys
import time

print(json.dumps({}), flush=True)
number = 0
while True:
    number += 1
    name = f"f{number:08}_" + "x" * 3900
    scope = {"clock": time.thread_time}
    code = f"def {name}():\n    end = clock() + 0.002\n    while clock() < end: pass\n"
    exec(compile(code, f"/{number:08}/" + "d" * 3900 + ".py", "exec"), scope)
    scope[name]()
