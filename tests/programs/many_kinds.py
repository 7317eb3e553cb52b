"""Work as services have it, all over the standard library: many_kinds.py SEED SECONDS. How much of each kind there is, is the seed's.

The figures of `docs/fleet.md` were made with it; `cargo xtask fleet` records it.
"""
import ast
import csv
import decimal
import difflib
import email
import fractions
import hashlib
import html.parser
import io
import json
import random
import re
import statistics
import sys
import textwrap
import time
import xml.etree.ElementTree as etree
import zlib

RANDOM = random.Random(int(sys.argv[1]))
TEXT = " ".join("".join(RANDOM.choices("abcdefghij", k=RANDOM.randint(2, 9))) for _ in range(400))
DATA = [{"id": number, "name": TEXT[number : number + 9], "tags": TEXT[number : number + 40].split()} for number in range(60)]
PAGE = "<ul>" + "".join(f"<li class='x'>{row['name']}</li>" for row in DATA) + "</ul>"


class Items(html.parser.HTMLParser):
    def handle_data(self, data):
        self.last = data.strip()


def api():
    return json.loads(json.dumps(DATA, indent=1))


def log():
    return [re.sub(r"\b([a-c]+)(\w)", r"\2\1", line) for line in textwrap.wrap(TEXT, 70)]


def pack():
    return zlib.decompress(zlib.compress(TEXT.encode() * 4, 6))


def page():
    Items().feed(PAGE)
    return etree.tostring(etree.fromstring(PAGE))


def report():
    rows = list(csv.DictReader(io.StringIO("a,b\n" + "\n".join(f"{n},{n * 7 % 13}" for n in range(80)))))
    return statistics.stdev(float(row["b"]) for row in rows), statistics.median(int(row["a"]) for row in rows)


def money():
    return sum(decimal.Decimal(n) / 7 for n in range(1, 60)), sum(fractions.Fraction(1, n) for n in range(1, 25))


def review():
    return list(difflib.unified_diff(TEXT.split()[:60], TEXT.split()[5:65]))


def source():
    return ast.dump(ast.parse("def f(a, b=1):\n    return [x * b for x in a if x]\n" * 6))


def mail():
    return email.message_from_string(f"From: a@b\nSubject: {TEXT[:30]}\n\n{TEXT}").get_payload()


def sign():
    return hashlib.pbkdf2_hmac("sha256", TEXT.encode(), b"salt", 300)


def order():
    return sorted(DATA, key=lambda row: (len(row["tags"]), row["name"]))


WORK = [api, log, pack, page, report, money, review, source, mail, sign, order]
WEIGHTS = [RANDOM.random() ** 2 + 0.02 for _ in WORK]


def handle():
    RANDOM.choices(WORK, WEIGHTS)[0]()


def serve(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        handle()


serve(float(sys.argv[2]))
