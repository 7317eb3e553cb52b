"""A process that runs one program after the other, by `exec`: each has functions and a file of its own.

Arguments: the number of the program, how many there are, milliseconds of CPU time each. The last one says that it is done.
"""
import os
import sys
import threading
import time

import handshake

CODE = """
def inner_{0}(end):
    while thread_time() < end:
        pass
def outer_{0}(end):
    return inner_{0}(end)
"""

number, count, milliseconds = (int(word) for word in sys.argv[1:])
names = {"thread_time": time.thread_time}
exec(compile(CODE.format(number), "program_%d.py" % number, "exec"), names)
outer = names["outer_%d" % number]
if number == 0:
    handshake.ready()
    sys.stdin.readline()
thread = threading.Thread(target=lambda: outer(milliseconds / 2000), daemon=True)
thread.start()
outer(time.thread_time() + milliseconds / 2000)
thread.join()
if number + 1 < count:
    # Each program has a name of its own, too.
    words = [sys.executable, "-B", os.path.abspath(__file__), str(number + 1), str(count), str(milliseconds)]
    os.execv(sys.executable, words)
print("done", flush=True)
sys.stdin.readline()
