"""Waits for one thing again and again: the one that it is told."""
import os
import select
import socket
import subprocess
import sys
import threading
import time

import handshake

CAUSE = sys.argv[1]
LENGTH = 0.004


def writes(write):
    while True:
        time.sleep(LENGTH)
        write(b"x")


def waiter():
    if CAUSE == "sleep":
        return lambda: time.sleep(LENGTH)
    if CAUSE == "lock":
        lock = threading.Lock()
        lock.acquire()
        return lambda: lock.acquire(timeout=LENGTH)
    if CAUSE == "poll":
        poll = select.epoll()
        return lambda: poll.poll(LENGTH)
    if CAUSE == "socket":
        one, other = socket.socketpair()
        threading.Thread(target=writes, args=(other.send,), daemon=True).start()
        return lambda: one.recv(1)
    if CAUSE == "socket_with_timeout":
        one, other = socket.socketpair()
        one.settimeout(5)
        threading.Thread(target=writes, args=(other.send,), daemon=True).start()
        return lambda: one.recv(1)
    if CAUSE == "pipe":
        reader, writer = os.pipe()
        threading.Thread(target=writes, args=(lambda byte: os.write(writer, byte),), daemon=True).start()
        return lambda: os.read(reader, 1)
    if CAUSE == "child":
        def child():
            pid = os.fork()
            if pid == 0:
                time.sleep(0.05)
                os._exit(0)
            os.waitpid(pid, 0)
        return child
    raise SystemExit(CAUSE)


def waits(wait):
    wait()


wait = waiter()
handshake.ready()
while True:
    waits(wait)
