"""Publishes a process context (OTEP 4719) in a memory file. Each line of input is a step of an update: `begin` says that it is
being written, `end VERSION` publishes another version of the service. With `in-a-child`, only a child that is forked at the first
line publishes one, half a second later; its pid is printed."""

import ctypes
import json
import mmap
import os
import struct
import sys
import time


def field(number, content):
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def attribute(key, text):
    return field(1, field(1, key.encode()) + field(2, field(1, text.encode())))


def publish(version):
    global payload
    message = field(1, attribute("service.name", "till") + attribute("service.version", version))
    payload = ctypes.create_string_buffer(message, len(message))
    header[:16] = struct.pack("=8sII", b"OTEL_CTX", 2, len(message))
    header[24:32] = struct.pack("=Q", ctypes.addressof(payload))
    header[16:24] = struct.pack("=Q", time.clock_gettime_ns(time.CLOCK_BOOTTIME))


def begin():
    global header
    file = os.memfd_create("OTEL_CTX")
    os.ftruncate(file, mmap.PAGESIZE)
    memory = mmap.mmap(file, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE)
    os.close(file)
    header = (ctypes.c_char * 32).from_buffer(memory)
    publish("1")


header = payload = None
if sys.argv[1:] == ["in-a-child"]:
    print(json.dumps({"service": "till"}), flush=True)
    sys.stdin.readline()
    parent, end = os.getpid(), time.monotonic() + 0.5
    if child := os.fork():
        print(child, flush=True)
        os.wait()
    while time.monotonic() < end:
        pass
    begin()
    while os.getppid() == parent:
        sum(range(1000))
    sys.exit()
begin()
print(json.dumps({"service": "till"}), flush=True)
for line in sys.stdin:
    step, *version = line.split()
    if step == "begin":
        header[16:24] = bytes(8)
    else:
        publish(*version)
    print(flush=True)
