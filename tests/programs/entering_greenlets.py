"""A greenlet that C calls Python functions in all the time, so that it enters the evaluator often, below a parent that is known."""
import greenlet
import handshake


def called(_):
    return 0


def burn():
    while True:
        for _ in map(called, range(100)):
            pass


def inner():
    handshake.ready()
    while True:
        list(map(lambda _: burn(), [0]))


def outer():
    begins()


def begins():
    greenlet.greenlet(inner).switch()


greenlet.greenlet(outer).switch()
