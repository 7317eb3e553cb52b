"""Calls machine code that it copies into memory of no file, as a just-in-time compiler does, and tells of it: in `/tmp/perf-PID.map`
(`mapped`; `old`: in one that is older than this process); in a `jitdump` file (`dumped DIR`), to which it adds a second function after
half a second; or, with the library of `made_code.c` and the object file of `made_code_function.c`, as debuggers are told (`told`), and
perhaps `by-library`: it is the library that calls it."""

import ctypes
import json
import mmap
import os
import struct
import sys
import time

# A loop of x86-64: `mov rax, rdi; dec rax; jnz -5; ret`.
LOOP = bytes.fromhex("4889f8 48ffc8 75fb c3")


def memory(size):
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    return mapped, ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def function(address):
    return ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long)(address)


def mapped_code(is_old):
    mapped, address = memory(4096)
    mapped[: len(LOOP)] = LOOP
    with open(f"/tmp/perf-{os.getpid()}.map", "w") as told:
        told.write(f"{address:x} {len(LOOP):x} mapped_work\n")
    if is_old:
        os.utime(told.name, (1e9, 1e9))
    return mapped, function(address)


def record(kind, body):
    return struct.pack("<IIQ", kind, 16 + len(body), time.monotonic_ns()) + body


def loaded(name, address, code, index):
    pid = os.getpid()
    return record(0, struct.pack("<IIQQQQ", pid, pid, address, address, len(code), index) + name + b"\0" + code)


def dumped_code(directory):
    """Two functions, of which the second one is told of when it is called first."""
    mapped, address = memory(4096)
    second = address + 64
    for at in (0, 64):
        mapped[at : at + len(LOOP)] = LOOP
    told = open(os.path.join(directory, f"jit-{os.getpid()}.dump"), "wb+", buffering=0)
    told.write(struct.pack("<IIIIIIQQ", 0x4A695444, 1, 40, 62, 0, os.getpid(), time.monotonic_ns(), 0))
    told.write(loaded(b"dumped_first", address, LOOP, 1))
    # What tells `perf` of the file.
    marker = mmap.mmap(told.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC)

    def more():
        told.write(loaded(b"dumped_work", second, LOOP, 2))
        return function(second)

    return (mapped, marker, told), function(address), more


def told_code(library, path, by_library=None):
    """Places the sections of an object file in memory, as a linker would, and tells where they are."""
    image = bytearray(open(path, "rb").read())
    (headers,) = struct.unpack_from("<Q", image, 40)
    count, names = struct.unpack_from("<HH", image, 60)
    sections = [list(struct.unpack_from("<IIQQQQIIQQ", image, headers + 64 * at)) for at in range(count)]
    mapped, address = memory(1 << 16)
    place = {}
    used = 0
    for at, (_, kind, flags, _, offset, size, *_) in enumerate(sections):
        if flags & 2 and kind != 8 and size:
            place[at] = address + used
            mapped[used : used + size] = image[offset : offset + size]
            used = (used + size + 63) & ~63
    start = None
    for at, (_, kind, _, _, offset, size, link, info, _, _) in enumerate(sections):
        symbols = sections[link][4] if kind == 4 else None
        if kind == 4 and info in place:
            for entry in range(offset, offset + size, 24):
                where, what, addend = struct.unpack_from("<QQq", image, entry)
                assert what & 0xFFFFFFFF == 2, "R_X86_64_PC32"
                section, value = struct.unpack_from("<HQ", image, symbols + 24 * (what >> 32) + 6)
                lies = place[info] + where
                struct.pack_into("<i", mapped, lies - address, place[section] + value + addend - lies)
        if kind == 2:
            for entry in range(offset, offset + size, 24):
                _, info_byte, _, section, value, length = struct.unpack_from("<IBBHQQ", image, entry)
                if info_byte & 0xF == 2:
                    start = place[section] + value
    for at, lies in place.items():
        struct.pack_into("<Q", image, headers + 64 * at + 16, lies)
    kept = ctypes.create_string_buffer(bytes(image), len(image))
    library = ctypes.CDLL(library)
    library.tell(kept, ctypes.c_uint64(len(image)))
    if by_library:
        run = library.run
        run.argtypes, run.restype = (ctypes.c_void_p, ctypes.c_long), ctypes.c_long
        return (mapped, kept), lambda rounds: run(start, rounds)
    return (mapped, kept), function(start)


def work(called, then):
    # Each call takes 10 ms or more, so that what `ctypes` does between two of them is rarely sampled.
    start = time.monotonic()
    while True:
        called(20_000_000)
        if then and time.monotonic() > start + 0.5:
            called, then = then(), None


then = None
if sys.argv[1] in ("mapped", "old"):
    held, called = mapped_code(sys.argv[1] == "old")
elif sys.argv[1] == "dumped":
    held, called, then = dumped_code(*sys.argv[2:])
else:
    held, called = told_code(*sys.argv[2:])
print(json.dumps({"pid": os.getpid()}), flush=True)
work(called, then)
