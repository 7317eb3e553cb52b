"""Takes orders from a queue, prices them, renders a page, packs and stores it, in four threads. Argument: for how many seconds."""
import hashlib
import json
import queue
import re
import sqlite3
import sys
import threading
import time
import zlib

ORDER = re.compile(r"(\w+)=([\w.]+)")
LOCK = threading.Lock()
STOP = time.monotonic() + float(sys.argv[1] if len(sys.argv) > 1 else 20)


class Pricing:
    def __init__(self):
        self.table = {f"item{i}": 1.0 + i % 17 for i in range(4000)}

    def discount(self, customer, total):
        rate = 0.0
        for step in range(60):
            rate += (hash((customer, step)) % 7) / 1000
        return total * (1 - min(rate, 0.3))

    def price(self, order):
        total = sum(self.table.get(name, 1.0) * count for name, count in order["items"])
        return self.discount(order["customer"], total)


def parse(line):
    fields = dict(ORDER.findall(line))
    items = [(f"item{i}", int(fields["n"]) % (i + 1)) for i in range(40)]
    return {"customer": fields["customer"], "items": items}


def render(order, total):
    rows = "".join(f"<tr><td>{name}</td><td>{count}</td></tr>" for name, count in order["items"])
    return f"<table>{rows}</table><p>{total:.2f}</p>"


def pack(order, page):
    text = json.dumps({"order": order, "page": page})
    return zlib.compress(text.encode(), 6)


def sign(blob):
    return hashlib.sha256(blob * 40).hexdigest()


def store(db, key, blob):
    with LOCK:
        db.execute("insert or replace into pages values (?, ?)", (key, blob))
        if key.startswith("0"):
            db.commit()


def worker(tasks, db):
    pricing = Pricing()
    while True:
        line = tasks.get()
        if line is None:
            return
        order = parse(line)
        total = pricing.price(order)
        page = render(order, total)
        blob = pack(order, page)
        store(db, sign(blob), blob)


def report(db):
    while time.monotonic() < STOP:
        time.sleep(0.5)
        with LOCK:
            sizes = [len(blob) for (blob,) in db.execute("select blob from pages limit 3000")]
        sorted(sizes, key=lambda size: -size)


def main():
    db = sqlite3.connect(":memory:", check_same_thread=False)
    db.execute("create table pages (key primary key, blob)")
    tasks = queue.Queue(64)
    workers = [threading.Thread(target=worker, args=(tasks, db), name=f"worker-{i}") for i in range(3)]
    reporter = threading.Thread(target=report, args=(db,), name="reporter")
    for thread in [*workers, reporter]:
        thread.start()
    n = 0
    while time.monotonic() < STOP:
        n += 1
        tasks.put(f"customer=c{n % 997} n={n} sku=a{n}")
    for _ in workers:
        tasks.put(None)
    for thread in [*workers, reporter]:
        thread.join()


main()
