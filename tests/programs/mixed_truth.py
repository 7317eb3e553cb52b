"""Knows its own stacks, of Python and of C: every way in which one calls the other.

Its arguments are the path of `extension.c`, compiled, how many threads do the same, how often Python and C call each other
in turns, and whether there are greenlets. It tells `paths`: each is what is called from the program's
beginning on, Python functions by name, and between two of them the C functions (`object!function`) or objects that stand
there when none of them is the interpreter's own. Below the first is what every program begins in, or what is in `roots`. A stack is right when it is the beginning of a path, and above it is
only C that the last function may call (`leaves`, or `everywhere`).
"""
import ctypes
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import threading
import zlib

import handshake


def load(path):
    loader = importlib.machinery.ExtensionFileLoader("extension", path)
    spec = importlib.util.spec_from_file_location("extension", path, loader=loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


extension = load(sys.argv[1])
libc = ctypes.CDLL(None)
Compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))
DATA = bytes((n * n) % 251 for n in range(1 << 15))
TEXT = "the quick brown fox jumps over the lazy dog " * 4
PATTERN = re.compile(r"\w+")
SLOW = re.compile(r"(x+x+)+y")
JSON = json.dumps([{"number": n} for n in range(20)])


def busy():
    total = 0
    for number in range(60):
        total += number * number
    return total


def compare(one, other):
    busy()
    return one[0] - other[0]


COMPARE = Compare(compare)


def by_qsort():
    array = (ctypes.c_int * 8)(3, 1, 2, 7, 6, 5, 4, 0)
    libc.qsort(array, 8, 4, COMPARE)


def key(number):
    busy()
    return -number


def by_sorted():
    sorted((3, 1, 2, 7, 6, 5, 4, 0), key=key)


def by_max():
    max((3, 1, 2), key=key)


def replace(match):
    busy()
    return ""


def by_regex():
    PATTERN.sub(replace, TEXT)


def in_regex():
    SLOW.match("x" * 14)


def hook(found):
    busy()
    return found


DECODER = json.JSONDecoder(object_hook=hook)


def by_json():
    DECODER.raw_decode(JSON)


def generator():
    for number in range(8):
        busy()
        yield number


def by_sum():
    sum(generator())


def by_loop():
    for _ in generator():
        pass


def delegating():
    yield from generator()


def by_delegation():
    list(delegating())


class Node(object):
    def __lt__(self, other):
        busy()
        return False

    def __eq__(self, other):
        busy()
        return True

    def __hash__(self):
        busy()
        return 1

    def __del__(self):
        busy()

    def __call__(self):
        busy()


def by_slots():
    sorted((Node(), Node(), Node()))


def by_dictionary():
    {Node(): 1, Node(): 2}


def by_call():
    Node()()


def by_map():
    list(map(key, (1, 2, 3)))


def in_zlib():
    zlib.compress(DATA, 6)


def in_hash():
    hashlib.sha256(DATA)


def by_plain():
    extension.plain(busy)


def by_aligned():
    extension.aligned(busy)


def by_aligned_and_grown():
    extension.aligned_and_grown(busy)


def by_grown():
    extension.grown(busy)


def by_large():
    extension.large(busy)


def by_many_arguments():
    extension.many_arguments(busy)


def by_many_registers():
    extension.many_registers(busy)


def by_sorted_by_c():
    extension.sorted_by_c(busy)


def in_extension():
    extension.with_gil()


def in_extension_without_gil():
    extension.without_gil()


LEFT = [0]


def deeper():
    if LEFT[0]:
        LEFT[0] -= 1
        extension.plain(deeper)
    else:
        busy()
        busy()


DEPTH = int(sys.argv[3]) if len(sys.argv) > 3 else 6


def by_turns():
    LEFT[0] = DEPTH
    extension.plain(deeper)


STATES = [
    by_qsort, by_sorted, by_max, by_regex, in_regex, by_json, by_sum, by_loop, by_delegation, by_slots, by_dictionary,
    by_call, by_map, in_zlib, in_hash, by_plain, by_aligned, by_aligned_and_grown, by_grown, by_large, by_many_arguments,
    by_many_registers, by_sorted_by_c, in_extension, in_extension_without_gil, by_turns,
]


def switched():
    busy()


def by_greenlet():
    greenlet.greenlet(switched).switch()


if len(sys.argv) > 4:
    import greenlet
    STATES.append(by_greenlet)


def run():
    while True:
        for state in STATES:
            state()


def objects():
    """Base names of what is mapped to be executed."""
    found = set()
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split(None, 5)
            if "x" in fields[1] and len(fields) == 6:
                found.add(os.path.basename(fields[5].strip()))
    return sorted(found)


def object_of(module):
    """Where a module's C code lies: nowhere for those that are part of the interpreter."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return [os.path.basename(file)] if ".so" in file else []


def name(function):
    return handshake.name_of(function.__code__)


def main():
    mapped = objects()
    ffi = [name for name in mapped if name.startswith("libffi")]
    crypto = [name for name in mapped if name.startswith("libcrypto")]
    libz = [name for name in mapped if name.startswith("libz.")]
    of_ctypes, own = object_of("_ctypes"), os.path.basename(sys.argv[1])
    through_ffi = of_ctypes + ffi
    three_deep = [own + "!" + step for step in ("plain", "three_deep", "innermost")]

    def c(*functions):
        return ["c", [own + "!" + function for function in functions]]

    ways = [
        [by_qsort, ["c", through_ffi + ["libc.so.6"] + through_ffi[::-1]], compare, busy],
        [by_sorted, key, busy],
        [by_max, key, busy],
        [by_regex, ["c", object_of("_sre")], replace, busy],
        [in_regex],
        [by_json, json.JSONDecoder.raw_decode, ["c", object_of("_json")], hook, busy],
        [by_sum, generator, busy],
        [by_loop, generator, busy],
        [by_delegation, delegating, generator, busy],
        [by_slots, Node.__lt__, busy],
        [by_slots, Node.__del__, busy],
        [by_dictionary, Node.__hash__, busy],
        [by_dictionary, Node.__eq__, busy],
        [by_dictionary, Node.__del__, busy],
        [by_call, Node.__call__, busy],
        [by_call, Node.__del__, busy],
        [by_map, key, busy],
        [in_zlib],
        [in_hash],
        [by_plain, c("plain", "three_deep", "innermost"), busy],
        [by_aligned, c("aligned", "innermost"), busy],
        [by_aligned_and_grown, c("aligned_and_grown", "innermost"), busy],
        [by_grown, c("grown", "innermost"), busy],
        [by_large, c("large", "innermost"), busy],
        [by_many_arguments, c("many_arguments", "nine", "innermost"), busy],
        [by_many_registers, c("many_registers", "innermost"), busy],
        [by_sorted_by_c, ["c", [own + "!sorted_by_c", "libc.so.6", own + "!compare"]], busy],
        [in_extension],
        [in_extension_without_gil],
        [by_turns] + [["c", three_deep], deeper] * (DEPTH + 1) + [busy],
    ]
    leaves = {
        by_qsort: through_ffi, in_regex: object_of("_sre"), by_regex: object_of("_sre"), in_zlib: object_of("zlib") + libz,
        in_hash: object_of("_hashlib") + crypto, json.JSONDecoder.raw_decode: object_of("_json"), compare: of_ctypes + ffi,
        # by_qsort's array is freed when its frame has been taken off the stack.
        run: of_ctypes,
    }
    leaves.update({way[0]: [own] for way in ways if "extension" in way[0].__code__.co_names})
    leaves[deeper] = [own]
    interpreter = [name for name in mapped if name.startswith(("python", "libpython"))]
    threads = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    if threads:
        # Each state's globals are shared; only those that keep none may run at once.
        STATES.remove(by_turns)
        STATES.remove(by_sorted_by_c)
    module = sys._getframe(1).f_code
    roots = [[handshake.name_of(module), name(main), name(run)]]
    if threads:
        thread = threading.Thread
        roots.append([name(thread._bootstrap), name(thread._bootstrap_inner), name(thread.run), name(run)])
    steps = [[step if isinstance(step, list) else ["py", name(step)] for step in way] for way in ways]
    paths = [[["py", function] for function in root] + way for root in roots for way in steps]
    here = object_of("greenlet._greenlet")
    if here:
        # A greenlet's Python stack ends where it began; what C is below that is its caller's.
        paths += [[["py", name(switched)], ["py", name(busy)]]]
        # What starts it.
        paths += [[["py", function] for function in [*root, name(by_greenlet)]] for root in roots]
        leaves[by_greenlet] = here
    if DEPTH > 6:
        del STATES[:-1]
    for _ in range(threads):
        threading.Thread(target=run, daemon=True).start()
    handshake.ready(
        paths=paths,
        leaves={name(function): found for function, found in leaves.items()},
        roots=here,
        everywhere=interpreter + ["libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "[vdso]"],
    )
    run()


main()
