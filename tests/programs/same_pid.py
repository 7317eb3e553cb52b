"""Processes that have the same pid, one after the other, each with a thread and a function of its own.

Runs in a pid namespace, whose next pid it sets. Arguments: that pid, how many processes.
"""
import subprocess
import sys

CODE = """
import threading, time
def task_{0}():
    end = time.thread_time() + 0.15
    while time.thread_time() < end: pass
thread = threading.Thread(target=task_{0})
thread.start()
task_{0}()
thread.join()
"""


def start(pid, number):
    while True:
        with open("/proc/sys/kernel/ns_last_pid", "w") as file:
            file.write(str(pid - 1))
        child = subprocess.Popen([sys.executable, "-S", "-c", CODE.format(number)])
        if child.pid == pid:
            return child
        # Another process was quicker to take the number.
        child.kill()
        child.wait()


for number in range(int(sys.argv[2])):
    start(int(sys.argv[1]), number).wait()
