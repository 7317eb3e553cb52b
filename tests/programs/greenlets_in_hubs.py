"""Greenlets of gevent or eventlet (argument) that work by turns, each in a function of its own and with a name of its own."""
import sys
import time

import handshake

if sys.argv[1] == "gevent":
    from gevent import sleep, spawn
else:
    from eventlet import sleep, spawn

COUNT = 20

for number in range(COUNT):
    exec(f"""
def burn_{number}():
    end = time.perf_counter() + 0.0005
    while time.perf_counter() < end:
        sum(range(20))


def work_{number}():
    while True:
        burn_{number}()
        sleep(0)
""")

workers = []
for number in range(COUNT):
    worker = spawn(globals()[f"work_{number}"])
    worker.name = f"worker {number}"
    workers.append(worker)
sleep(0.1)
handshake.ready(ids=[id(worker) for worker in workers])
while True:
    sleep(1000)
