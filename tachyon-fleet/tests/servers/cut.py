"""A way to a server that breaks: cut.py OUT CONTROL PORT      Every connection is cut after so many bytes of answers or requests: control {"after": bytes}."""
import select
import socket
import socketserver
import sys

from common import Log, control, ready

LOG = Log(sys.argv[1])
CONTROL = sys.argv[2]
PORT = int(sys.argv[3])


class Handler(socketserver.BaseRequestHandler):
    def handle(self):
        server = socket.create_connection(("127.0.0.1", PORT))
        pair = {self.request: server, server: self.request}
        passed = 0
        while True:
            for side in select.select(list(pair), [], [])[0]:
                try:
                    data = side.recv(4096)
                except OSError:
                    return
                passed += len(data)
                limit = control(CONTROL).get("after")
                if limit is not None and passed > limit:
                    LOG.write({"cut": passed})
                    return
                if not data:
                    return
                pair[side].sendall(data)


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


server = Server(("127.0.0.1", control(CONTROL).get("port", 0)), Handler)
ready(http=server.server_address[1])
server.serve_forever()
