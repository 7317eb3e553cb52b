"""A job that works in phases of random length: it reads, groups, sorts and writes. Argument: for how many seconds."""
import csv
import io
import json
import random
import sys
import time

END = time.monotonic() + float(sys.argv[1])
LINES = [json.dumps({"user": f"u{number % 97}", "amount": number % 1013, "tags": ["a", "b", "c"]}) for number in range(400)]


def decode(line):
    return json.loads(line)


def validate(order):
    return order["amount"] >= 0 and all(len(tag) < 8 for tag in order["tags"])


def read():
    return [order for order in map(decode, LINES) if validate(order)]


def group(orders):
    groups = {}
    for order in orders:
        groups.setdefault(order["user"], []).append(order["amount"])
    return groups


def key(item):
    user, amounts = item
    return sum(amounts), user


def rank(groups):
    return sorted(groups.items(), key=key)


def write(ranked):
    out = io.StringIO()
    writer = csv.writer(out)
    for user, amounts in ranked:
        writer.writerow([user, *amounts])
    return out.getvalue()


def phase(work, *args):
    end = min(END, time.monotonic() + random.uniform(0.1, 0.8))
    while True:
        done = work(*args)
        if time.monotonic() >= end:
            return done


def main():
    while time.monotonic() < END:
        orders = phase(read)
        groups = phase(group, orders)
        ranked = phase(rank, groups)
        phase(write, ranked)


main()
