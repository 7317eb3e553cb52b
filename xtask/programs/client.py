"""Asks a server on this machine the same few questions for ever, over connections that it keeps: `client.py PORT`.

Prints a line at the first answer. Plain sockets, so that the server is what is busy.
"""
import selectors
import socket
import sys
import time

PATHS = [b"/", b"/orders", b"/", b"/orders?first=10"]


def request(number):
    return b"GET " + PATHS[number % len(PATHS)] + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def connected(port):
    deadline = time.monotonic() + 120
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def whole(data):
    """Whether a whole answer has come; both ways to tell its length."""
    head, end, body = data.partition(b"\r\n\r\n")
    head = head.lower()
    if not end:
        return False
    if b"transfer-encoding: chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    if b"content-length:" in head:
        return len(body) >= int(head.split(b"content-length:")[1].split(b"\r\n")[0])
    return False


def main(port, connections=6):
    selector, asked, said = selectors.DefaultSelector(), 0, False

    def ask(stream):
        nonlocal asked
        asked += 1
        stream.sendall(request(asked))

    def begin():
        stream = connected(port)
        selector.register(stream, selectors.EVENT_READ, bytearray())
        ask(stream)

    for _ in range(connections):
        begin()
    while True:
        for key, _ in selector.select():
            data = key.data
            try:
                part = key.fileobj.recv(1 << 16)
            except OSError:
                part = b""
            data += part
            if not part:
                # Servers that answer once a connection.
                selector.unregister(key.fileobj)
                key.fileobj.close()
                begin()
            elif whole(bytes(data)):
                if b" 200 " not in data[:16]:
                    sys.exit(f"not answered: {bytes(data[:200])!r}")
                if not said:
                    said = True
                    print("ready", flush=True)
                data.clear()
                try:
                    ask(key.fileobj)
                except OSError:
                    pass


main(int(sys.argv[1]))
