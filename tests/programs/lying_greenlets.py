"""Greenlets whose memory says what cannot be, beside one that is as it should be. Nothing ever goes on with them.

What is changed lies in greenlet's own objects: where a stack has been copied to, the frame, the parent (`docs/tasks.md` has the source).
"""
import ctypes
import gc
import sys
import time

import greenlet
import handshake

MAX = 2**64


def wait():
    main.switch()


def honest():
    wait()


def liar():
    wait()


def word(at):
    return ctypes.c_uint64.from_address(at)


def implementation(of):
    return word(id(of) + 32).value


def begun(function):
    made = greenlet.greenlet(function)
    made.switch()
    return made


STACK_STATE = 56 if sys.version_info >= (3, 11) else 72
TOP_FRAME = STACK_STATE + 48


def lie(number, of):
    stack, top_frame = implementation(of) + STACK_STATE, word(implementation(of) + TOP_FRAME)
    if number == 0:
        # All of its memory is a copy of what cannot be read.
        word(stack).value, word(stack + 16).value, word(stack + 24).value = 4096, 8, MAX - 4097
    elif number == 1:
        # Its stack ends beyond all addresses.
        word(stack).value, word(stack + 16).value, word(stack + 24).value = MAX - 64, MAX - 32, MAX - 1
    elif number == 2:
        word(id(of) + 32).value = MAX - 16
    elif number == 3:
        top_frame.value = id(kept)
    elif number == 4:
        # Its outermost frame was called by its innermost one.
        if sys.version_info >= (3, 11):
            circle(word(top_frame.value + 24).value)
        else:
            word(top_frame.value + 24).value = top_frame.value
    elif number == 5:
        # It is its own parent, and its thread's main greenlet.
        at = implementation(of) + TOP_FRAME + 8
        while word(at).value != id(main):
            at += 8
        word(at).value = word(at + 16).value = id(of)


def circle(innermost):
    """An interpreter's frame called itself: `previous` is the word that points to a frame nearby."""
    for offset in range(0, 88, 8):
        pointer = word(innermost + offset).value
        if pointer and abs(pointer - innermost) < 4096 and pointer != innermost:
            word(innermost + offset).value = innermost
            return


gc.disable()
main = greenlet.getcurrent()
kept = [begun(liar) for _ in range(6)]
good = begun(honest)
for number, made in enumerate(kept):
    lie(number, made)
handshake.ready(good=id(good), liars=[id(made) for made in kept])
while True:
    time.sleep(0.05)
