"""Waits in `select` all the time, under a function of a known name."""
import selectors
import sys

import handshake


def wait_for_input():
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    selector.select()


handshake.ready(select_file=selectors.__file__)
wait_for_input()
