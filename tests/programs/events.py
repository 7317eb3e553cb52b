"""Does known numbers of things that are events, each in a function of its own, when it is told to."""
import mmap
import os
import sys

import handshake

PAGE = mmap.PAGESIZE
ROUNDS = int(sys.argv[1])


def touch_few(memory):
    for at in range(0, 100 * PAGE, PAGE):
        memory[at] = 1


def touch_many(memory):
    for at in range(0, 300 * PAGE, PAGE):
        memory[at] = 1


def touch_all(memory):
    for at in range(0, 400 * PAGE, PAGE):
        memory[at] = 1


def open_one():
    os.close(os.open("/dev/null", os.O_RDONLY))


def open_more():
    for _ in range(7):
        os.close(os.open("/dev/null", os.O_RDONLY))


def one_round():
    for touch in (touch_few, touch_many, touch_all):
        memory = mmap.mmap(-1, 400 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A huge page would be one fault instead of 512.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        touch(memory)
        memory.close()
    open_one()
    open_more()


# What is used for the first time is used now.
one_round()
handshake.ready()
sys.stdin.readline()
for _ in range(ROUNDS):
    one_round()
print("done", flush=True)
handshake.until_closed()
