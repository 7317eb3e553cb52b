"""Stands in for Grafana Pyroscope's push API: takes what it takes, refuses what it refuses (its pkg/validation/validate.go and limits.go; the field numbers are those of
api/push/v1/push.proto, api/types/v1/types.proto and pprof's profile.proto), and writes each profile decoded.

pyroscope.py OUT CONTROL      control: {"now": seconds since 1970, "at": by this clock, "speed": so many times as fast, "status": 503, "forget": true, "port": 0}"""
import gzip
import http.server
import re
import sys
import time

from common import Log, control, ready

OUT, CONTROL = sys.argv[1:3]
LOG = Log(OUT)
SERIES = {}
HOUR = 3600


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def fields(data):
    """Fields of a message as (number, value)."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
        elif key & 7 == 2:
            size, at = varint(data, at)
            value, at = data[at : at + size], at + size
        else:
            raise ValueError(f"wire type {key & 7}")
        yield key >> 3, value


def message(data):
    found = {}
    for number, value in fields(data):
        found.setdefault(number, []).append(value)
    return found


def numbers(values):
    """A repeated number, packed or not."""
    found = []
    for value in values:
        if isinstance(value, int):
            found.append(value)
        else:
            at = 0
            while at < len(value):
                number, at = varint(value, at)
                found.append(number)
    return found


class Refused(Exception):
    pass


def refuse(reason):
    raise Refused(reason)


def profile(labels, raw, now):
    data = gzip.decompress(raw)
    if len(data) > 4 << 20:
        refuse(f"the profile with labels '{labels}' exceeds the size limit (max_profile_size_byte, actual: {len(data)}, limit: {4 << 20})")
    pprof = message(data)
    strings = [text.decode() for text in pprof[6]]
    if strings[0] != "" or max(map(len, strings)) > 65_535:
        refuse("strings")
    if len(pprof.get(2, [])) > 16_000:
        refuse("the profile exceeds the samples count limit (max_profile_stacktrace_samples)")
    start = pprof[9][0] / 1e9
    if not now - HOUR <= start <= now + 600:
        refuse(f"profile with labels '{labels}' is outside of ingestion window (profile timestamp: {start}, the ingestion window starts at {now - HOUR})")
    functions = {f[1][0]: (strings[f[2][0]], strings[f.get(4, [0])[0]]) for f in map(message, pprof.get(5, []))}
    locations = {}
    for location in map(message, pprof.get(4, [])):
        line = message(location[4][0])
        if location[1][0] == 0 or line[1][0] == 0:
            refuse("id is 0")
        locations[location[1][0]] = [*functions[line[1][0]], line.get(2, [0])[0]]
    types = []
    for kind in map(message, pprof[1]):
        name = strings[kind[1][0]]
        if "-" in name:
            refuse("sample type contains -")
        types.append(name)
    samples = []
    for sample in map(message, pprof.get(2, [])):
        ids = numbers(sample[1])
        if len(ids) > 1000:
            refuse("it would be cut at the leaf")
        samples.append({"stack": [locations[i] for i in ids], "values": numbers(sample[2])})
    return {"types": types, "samples": samples, "start": start}


def push(body, tenant, now):
    found = []
    for series in map(message, message(body).get(1, [])):
        labels = [(m[1][0].decode(), m[2][0].decode()) for m in map(message, series.get(1, []))]
        names = [name for name, _ in labels]
        if len(labels) > 30:
            refuse(f"profile series has {len(labels)} label names; limit 30")
        if len(set(names)) != len(names):
            refuse("duplicate label name")
        if not dict(labels).get("service_name"):
            refuse("service name is not provided")
        for name, value in labels:
            if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", name) or len(name) > 1024 or len(value) > 2048:
                refuse(f"invalid label '{name}'")
        if not re.fullmatch("[a-zA-Z_:][a-zA-Z0-9_:]*", dict(labels).get("__name__", "")):
            refuse("invalid metric name")
        if "pid" in names:
            refuse("the test wants no pid")
        SERIES.setdefault(tenant, set()).add(tuple(sorted(labels)))
        if len(SERIES[tenant]) > 5000:
            refuse("Maximum active series limit exceeded (5001/5000)")
        for sample in map(message, series[2]):
            identity = sample[2][0].decode()
            if not re.fullmatch("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", identity):
                refuse("ID is no UUID")
            found.append({"labels": dict(labels), "id": identity, **profile(labels, sample[1][0], now)})
    return found


class Http(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        wanted = control(CONTROL)
        if self.path != "/push.v1.PusherService/Push" or self.headers["content-type"] != "application/proto":
            return self.reply(404, b"404 page not found")
        tenant = self.headers["x-scope-orgid"]
        status = wanted.get("status", 200)
        if status == 200 or wanted.get("forget"):
            try:
                now = time.time()
                now = wanted.get("now", now) + (now - wanted.get("at", now)) * wanted.get("speed", 0)
                found = push(body, tenant, now)
            except Refused as error:
                LOG.write({"refused": str(error)})
                return self.reply(400, ('{"code":"invalid_argument","message":"%s"}' % error).encode())
            LOG.write({"tenant": tenant, "profiles": found})
        self.reply(status, b"" if status == 200 else b'{"code":"unavailable"}')

    def reply(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


web = http.server.ThreadingHTTPServer(("127.0.0.1", control(CONTROL).get("port", 0)), Http)
ready(http=web.server_port)
web.serve_forever()
