"""A program that ends in an unusual way, and says before how much CPU time it has used.

`leader`: the main thread ends first (`pthread_exit`), another one works on. `together`: eight threads that have worked end at once.
"""
import ctypes
import os
import sys
import threading
import time


def work(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def last(seconds):
    work(seconds)
    with open(sys.argv[2], "w") as file:
        file.write(str(time.process_time()))
    os._exit(0)


if sys.argv[1] == "leader":
    work(0.3)
    threading.Thread(target=last, args=(0.7,)).start()
    # `SYS_exit` of x86-64 and of arm64: ends this thread alone.
    ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
else:
    done = threading.Barrier(9)

    def one():
        work(0.12)
        done.wait()
        time.sleep(60)

    for _ in range(8):
        threading.Thread(target=one).start()
    done.wait()
    last(0.05)
