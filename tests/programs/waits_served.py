"""A WSGI application whose answers wait for a database: each is one question to it, and 1 ms of work. The database's port is in the
environment."""
import os
import socket
import threading

import handshake

LOCAL = threading.local()


def query(text):
    if not hasattr(LOCAL, "database"):
        LOCAL.database = socket.create_connection(("127.0.0.1", int(os.environ["TACHYON_TEST_DATABASE"])))
    LOCAL.database.sendall(text)
    return LOCAL.database.recv(100)


def application(_environ, start_response):
    answer = query(b"?")
    handshake.spin(0.001)
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"%d" % os.getpid() if answer else b""]
