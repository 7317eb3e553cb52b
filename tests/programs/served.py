"""A WSGI application: each answer takes 20 ms of work, and tells who worked."""
import os
import time


def busy():
    end = time.thread_time() + 0.02
    while time.thread_time() < end:
        pass


def application(_environ, start_response):
    busy()
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"%d" % os.getpid()]
