"""3,000 short threads, eight at a time. Each runs a function that is compiled for it and named after its thread id."""
import threading

import handshake

THREADS = 3000
AT_ONCE = 8

TEMPLATE = """
def thread_{0}():
    def work_{0}():
        spin(0.0003)
    work_{0}()
"""


def body():
    tid = threading.get_native_id()
    names = {"spin": handshake.spin}
    exec(compile(TEMPLATE.format(tid), "storm_%d.py" % tid, "exec"), names)
    names["thread_%d" % tid]()


def chain(count):
    """Runs `count` threads one after the other: each is started by the one before."""
    body()
    if count > 1:
        following = threading.Thread(target=chain, args=(count - 1,))
        following.start()
        chained.append(following)


chained = []
handshake.ready(threads=THREADS)
input()
for _ in range(AT_ONCE):
    first = threading.Thread(target=chain, args=(THREADS // AT_ONCE,))
    first.start()
    chained.append(first)
while chained:
    chained.pop(0).join()
print("done", flush=True)
handshake.until_closed()
