"""Three worker processes that serve requests of random kinds. Argument: for how many seconds."""
import os
import random
import re
import sys
import time

END = time.monotonic() + float(sys.argv[1])
WORD = re.compile(r"[a-z]+")
TEXT = "the quick brown fox jumps over the lazy dog " * 40


def tokens(text):
    return WORD.findall(text)


def count(words):
    counts = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return counts


def escape(text):
    return text.replace("&", "&amp;").replace("<", "&lt;")


def search(request):
    return count(tokens(TEXT[request:]))


def page(request):
    rows = [escape(f"row {request} & {number} < {number + 1}") for number in range(120)]
    return "\n".join(rows)


def checksum(request):
    value = request
    for byte in TEXT.encode():
        value = (value * 31 + byte) & 0xFFFFFFFF
    return value


def serve():
    kinds = [search] * 5 + [page] * 3 + [checksum] * 2
    while time.monotonic() < END:
        random.choice(kinds)(random.randrange(500))


for _ in range(2):
    if os.fork() == 0:
        break
random.seed()
serve()
