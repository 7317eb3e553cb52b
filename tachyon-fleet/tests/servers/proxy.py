"""A proxy that refuses CONNECT, or passes on. proxy.py OUT STATUS"""
import select
import socket
import socketserver
import sys

from common import Log, ready

LOG = Log(sys.argv[1])
STATUS = int(sys.argv[2])


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        line = self.rfile.readline().decode()
        while self.rfile.readline().strip():
            pass
        LOG.write({"line": line.strip()})
        if STATUS != 200:
            self.wfile.write(b"HTTP/1.1 %d No\r\ncontent-length: 0\r\n\r\n" % STATUS)
            return
        host, port = line.split()[1].rsplit(":", 1)
        server = socket.create_connection((host, int(port)))
        self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        pair = {self.connection: server, server: self.connection}
        while True:
            for side in select.select(list(pair), [], [])[0]:
                data = side.recv(65536)
                if not data:
                    return
                pair[side].sendall(data)


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


server = Server(("127.0.0.1", 0), Handler)
ready(http=server.server_address[1])
server.serve_forever()
