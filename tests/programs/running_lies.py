"""A greenlet that burns, and whose memory says what cannot be. Nothing ever goes on with any other.

What is changed lies in greenlet's own objects (`docs/tasks.md` has the source). Argument: what is a lie.
"""
import ctypes
import gc
import sys

import greenlet
import handshake

BELOW = 2**63
STACK_STATE = 56 if sys.version_info >= (3, 11) else 72
TOP_FRAME = STACK_STATE + 48


def word(at):
    return ctypes.c_uint64.from_address(at)


def implementation(of):
    return word(id(of) + 32).value


def main_at(of):
    """Where the main greenlet is in it; its parent is two words after that."""
    at = implementation(of) + TOP_FRAME + 8
    while word(at).value != id(main):
        at += 8
    return at


def lie(kind, inner, outer):
    if kind == "own-parent":
        word(main_at(outer) + 16).value = id(outer)
    elif kind == "no-greenlet":
        word(main_at(inner) + 16).value = id(main_at)
    elif kind == "nowhere":
        word(main_at(inner) + 16).value = BELOW
    elif kind == "circle":
        frame = word(implementation(outer) + TOP_FRAME).value
        # A frame object, or what it leads to: called by itself.
        innermost = word(frame + 24).value if sys.version_info >= (3, 11) else frame
        for offset in range(0, 88, 8) if innermost != frame else [24]:
            pointer = word(innermost + offset).value
            if innermost == frame or pointer and abs(pointer - innermost) < 4096 and pointer != innermost:
                word(innermost + offset).value = innermost
                break
    elif kind == "no-frame":
        word(implementation(outer) + TOP_FRAME).value = BELOW
    elif kind == "dictionary":
        word(id(inner) + 24).value = BELOW
    elif kind == "name":
        inner.name = "liar"
        # Of no type.
        word(id(inner.name) + 8).value = BELOW
    elif kind == "current":
        at = main_thread_state()
        word(at + 8).value = BELOW


def main_thread_state():
    """The address of the thread's state follows the main greenlet's own."""
    at = implementation(main) + TOP_FRAME + 8
    while word(at).value != id(main):
        at += 8
    return word(at + 8).value


class Inner(greenlet.greenlet):
    pass


class Outer(greenlet.greenlet):
    pass


def burn():
    while True:
        sum(range(100))


def inner():
    here = greenlet.getcurrent()
    lie(sys.argv[1], here, here.parent)
    handshake.ready()
    burn()


def outer():
    begins()


def begins():
    Inner(inner).switch()


gc.disable()
main = greenlet.getcurrent()
Outer(outer).switch()
