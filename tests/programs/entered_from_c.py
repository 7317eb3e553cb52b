"""Does nothing but enter Python from C: sort keys, re.sub callbacks, `__del__`, each with a callee of its own.

`edges` are all the calls there are: [caller, callee], with every place of each function.
"""
import re

import handshake

NUMBERS = [(index * 7919) % 1009 for index in range(200)]
WORDS = "one two three four five six seven eight nine ten " * 10
PATTERN = re.compile(r"\w+")


class Item:
    def __init__(self, value):
        self.value = value

    def key(self):
        return half(self.value)

    def __lt__(self, other):
        return less(self.value, other.value)

    def __del__(self):
        forget(self)


def half(value):
    return value // 2


def less(left, right):
    return left < right


def forget(item):
    item.value = None


def replace(match):
    return shout(match.group())


def shout(word):
    return word.upper()


def by_key():
    sorted(items, key=Item.key)


def by_comparison():
    sorted(items)


def substitute():
    PATTERN.sub(replace, WORDS)


def drop():
    made = list(map(Item, NUMBERS))
    made.clear()


CALLS = [
    (by_key, [Item.key]),
    (Item.key, [half]),
    (by_comparison, [Item.__lt__]),
    (Item.__lt__, [less]),
    (substitute, [replace]),
    (replace, [shout]),
    (drop, [Item.__init__, Item.__del__]),
    (Item.__del__, [forget]),
]
functions = {handshake.name_of(function.__code__): function for pair in CALLS for function in [pair[0]] + pair[1]}
items = list(map(Item, NUMBERS))
module = handshake.positions(__import__("sys")._getframe().f_code)
handshake.ready(
    filename=__file__,
    edges=[["<module>", handshake.name_of(function.__code__)] for function in (by_key, by_comparison, substitute, drop)]
    + [[handshake.name_of(caller.__code__), handshake.name_of(callee.__code__)] for caller, callees in CALLS for callee in callees],
    positions=dict({name: handshake.positions(function.__code__) for name, function in functions.items()}, **{"<module>": module}),
)
while True:
    by_key()
    by_comparison()
    substitute()
    drop()
