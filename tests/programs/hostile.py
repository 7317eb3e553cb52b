"""A program that lies to whoever reads its memory and its files. Its argument says how.

Fields are found by what they hold (the address of a frame, of a name), so that the program fits every version. Nothing
here may return from the function that attacks: its own interpreter would believe the lies, too.
"""
import ctypes
import gc
import mmap
import os
import random
import shutil
import struct
import sys
import tempfile
import threading

import handshake

WORD = 8
UNMAPPED = 0xDEAD_0000_0000
NOT_CANONICAL = 0xDEAD_BEEF_DEAD_BEEF
KERNEL = 0xFFFF_8880_0000_0000
PYTHON_API = ctypes.pythonapi


def word(address):
    return ctypes.c_uint64.from_address(address)


def find(address, value, words=64):
    """The address of the word at or after `address` that holds `value`."""
    for place in range(address, address + words * WORD, WORD):
        if word(place).value == value:
            return place
    raise LookupError(f"{value:#x} is not near {address:#x}")


def interpreter_frame(frame):
    """`PyFrameObject.f_frame`, after the object's head and `f_back`."""
    return word(id(frame) + 3 * WORD).value


def spin():
    while True:
        pass


def linked(lie):
    """Spins with a frame whose `previous` is `lie(its own address)`."""
    frame = sys._getframe()
    inner, outer = interpreter_frame(frame), interpreter_frame(frame.f_back)
    link = find(inner, outer, 16)
    handshake.ready()
    word(link).value = lie(inner)
    while True:
        pass


def frame_cycle():
    linked(lambda inner: inner)


def frame_unmapped():
    linked(lambda _inner: UNMAPPED)


def frame_not_canonical():
    linked(lambda _inner: NOT_CANONICAL)


def frame_in_kernel():
    linked(lambda _inner: KERNEL)


def frame_of_itself():
    """The chain leads into plain bytes: a frame that the program made up, whose code is no code object."""
    fake = ctypes.create_string_buffer(4096)
    base = ctypes.addressof(fake)
    for place in range(base, base + 256, WORD):
        word(place).value = base
    linked(lambda _inner: base)


def huge_name():
    """A name of 2^40 bytes by its own account."""
    def named():
        while True:
            pass

    code = named.__code__
    name = "".join(["huge", "_", "name"])
    code = code.replace(co_name=name, co_qualname=name)
    named.__code__ = code
    handshake.ready()
    # PyASCIIObject.length follows the object's head.
    word(id(code.co_qualname) + 2 * WORD).value = 1 << 40
    named()


def long_name():
    """A name of 4 MB, which is really there."""
    name = "n" * (4 << 20)
    spin.__code__ = spin.__code__.replace(co_name=name, co_qualname=name)
    handshake.ready()
    spin()


def odd_names():
    """Terminal escapes, line feeds, the separators of text formats, and what is no Unicode text."""
    odd = sys.argv[2:] + ["lone\udcff\ud800"]
    for name in odd:
        def named(function):
            function()

        named.__code__ = named.__code__.replace(co_name=name, co_qualname=name, co_filename="/" + name)
        inner = spin if name is odd[0] else outer
        outer = lambda named=named, inner=inner: named(inner)
    set_comm(b"\x1b[2J\n;c\xff")
    handshake.ready()
    outer()


def set_comm(name):
    PR_SET_NAME = 15
    ctypes.CDLL(None).prctl(PR_SET_NAME, ctypes.c_char_p(name), 0, 0, 0)


def thread_cycle():
    """A list of threads without an end, in which this thread is not to be found."""
    other = threading.Thread(target=threading.Event().wait, daemon=True)
    other.start()
    current = PYTHON_API.PyThreadState_Get
    current.restype = ctypes.c_void_p
    tstate = current()
    own_id = find(tstate, threading.get_ident(), 64)
    handshake.ready()
    # `prev` and `next` are the first two words, in either order by version: no one but the walk follows them now.
    word(tstate).value = word(tstate + WORD).value = tstate
    word(own_id).value = 1
    spin()


def debug_offsets():
    """Rewrites `_Py_DebugOffsets` (the head of `_PyRuntime`) as fast as it can, truth and lies in turn."""
    runtime = ctypes.addressof(ctypes.c_char.in_dll(PYTHON_API, "_PyRuntime"))
    size = 256 if sys.version_info >= (3, 13) else 0
    truth = ctypes.string_at(runtime, size)
    lies = random.Random(0).randbytes(size)
    handshake.ready()
    while True:
        ctypes.memmove(runtime, lies, size)
        ctypes.memmove(runtime, truth, size)


def many_threads():
    threading.stack_size(64 * 1024)
    gate = threading.Event()
    for _ in range(2_000):
        threading.Thread(target=gate.wait, daemon=True).start()
    handshake.ready()
    spin()


def storm():
    """Forks and execs as fast as it can; at most eight at a time, for as long as somebody listens."""
    handshake.ready()
    alive = 0
    while True:
        while alive >= 8:
            os.wait()
            alive -= 1
        child = os.fork()
        if child == 0:
            if random.random() < 0.5:
                os._exit(0)
            # Chains of execs: a new image each.
            script = "exec sh -c 'exec sh -c \"exec true\"'"
            os.execv("/bin/sh", ["sh", "-c", script])
        alive += 1


def libpython():
    """The file that holds this interpreter."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            path = line.rstrip("\n").split(None, 5)[5:]
            if path and "libpython3" in path[0]:
                return path[0]
    return os.path.realpath(sys.executable)


def map_code(path, length=4096):
    """Maps the beginning of a file as code is: private, executable, in two parts."""
    file = os.open(path, os.O_RDONLY)
    try:
        flags, readable, code = mmap.MAP_PRIVATE, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_EXEC
        return [mmap.mmap(file, length, flags, readable), mmap.mmap(file, length, flags, code)]
    finally:
        os.close(file)


def crafted_files():
    """Files named as CPython's library that are devices, sparse, or ELF files changed at random places.

    They are mapped in a process of another interpreter too, so every one of them is a candidate.
    """
    folder = tempfile.mkdtemp(prefix="hostile")
    kept = []
    source = libpython()
    with open(source, "rb") as file:
        good = file.read(64 << 10)
        head = good[:64]
    sections = struct.unpack_from("<Q", head, 0x28)[0]

    def made(name, size, patches):
        path = os.path.join(folder, name)
        with open(path, "wb") as out:
            out.write(good)
            out.truncate(size)
            for place, patch in patches:
                out.seek(place)
                out.write(patch)
        kept.append(map_code(path))
        return path

    # 1 TB, all of it one symbol table by its own section header.
    terabyte = 1 << 40
    section = struct.pack("<IIQQQQIIQQ", 1, 2, 0, 0, 4096, terabyte - 8192, 1, 1, 8, 24)
    strings = struct.pack("<IIQQQQIIQQ", 1, 3, 0, 0, 4096, terabyte - 8192, 0, 0, 1, 0)
    table = terabyte - 4096
    made("libpython3.12.so.1.0", terabyte, [(0x28, struct.pack("<Q", table)), (0x3C, struct.pack("<HH", 2, 1)),
                                             (table, section + strings)])
    made("libpython3.13.so.1.0", terabyte, [])
    # As many sections as the format can say.
    made("libpython3.11.so.1.0", 1 << 30, [(0x28, struct.pack("<Q", 64)), (0x3C, struct.pack("<HH", 0, 0)),
                                            (64, struct.pack("<IIQQQQIIQQ", 0, 2, 0, 0, 0, (1 << 63) - 1, 7, 0, 0, 0))])
    dice = random.Random(1)
    for number in range(40):
        patches = [(dice.randrange(len(good)), dice.randbytes(1)) for _ in range(200)]
        patches += [(dice.randrange(0x400), dice.randbytes(dice.choice([1, 2, 4, 8]))) for _ in range(4)]
        path = made(f"libpython3.{number}.so", len(good), [patch for patch in patches if patch[0] > 20])
        # The section headers of the real file, changed too.
        with open(source, "rb") as file, open(path, "r+b") as out:
            shutil.copyfileobj(file, out)
            for _ in range(100):
                out.seek(sections + dice.randrange(40 * 64))
                out.write(dice.randbytes(1))
        kept.append(map_code(path))
    # A device, mapped as code; a FIFO where a mapped file was; a file that is gone.
    kept.append(map_code("/dev/zero"))
    fifo = made("libpython3.9.so", 1 << 20, [])
    os.unlink(fifo)
    os.mkfifo(fifo)
    gone = made("libpython3.10.so\x1b[2J\n", 1 << 20, [])
    os.unlink(gone)
    shutil.rmtree(folder)
    os.mkdir(folder)
    os.mkfifo(fifo)
    handshake.ready(folder=folder)
    spin()


def section(image, name):
    """Where the header of a section of an ELF image is, and the section's offset and size."""
    start, = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    names_at, = struct.unpack_from("<Q", image, start + names * size + 0x18)
    for header in range(start, start + count * size, size):
        at = names_at + struct.unpack_from("<I", image, header)[0]
        if image[at:image.index(b"\0", at)] == name:
            return (header,) + struct.unpack_from("<QQ", image, header + 0x18)
    raise LookupError(name)


def absurd_eh_frame():
    """Libraries whose `.eh_frame` is nonsense of many kinds, mapped as code; the first is rewritten all the time."""
    folder = tempfile.mkdtemp(prefix="hostile")
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        libraries = {line.split()[5] for line in maps if "r-x" in line and ".so" in line}
    with open(min(libraries, key=os.path.getsize), "rb") as file:
        good = file.read()
    header, at, size = section(good, b".eh_frame")
    kept = []

    def made(patches, length=len(good)):
        path = os.path.join(folder, "lib%d.so" % len(kept))
        with open(path, "wb") as out:
            out.write(good)
            out.truncate(length)
            for place, patch in patches:
                out.seek(place)
                out.write(patch)
        # The whole file, as code may be anywhere in it.
        kept.append(map_code(path, len(good)))
        return path

    dice = random.Random(2)
    changing = made([])
    made([(at, b"\xff" * size)])
    made([(at, b"\x00" * size)])
    # A record of 2^63 bytes; one that is its own CIE; sizes of the section that no file has.
    made([(at, struct.pack("<IQ", 0xFFFF_FFFF, 1 << 63))])
    made([(at + 4, struct.pack("<I", 4))])
    made([(header + 0x20, struct.pack("<Q", (1 << 40) - at))], 1 << 40)
    made([(header + 0x20, struct.pack("<Q", (1 << 64) - 1))])
    made([(header + 0x18, struct.pack("<QQ", (1 << 64) - 8, 16))])
    # Long expressions (DW_CFA_def_cfa_expression), records that overlap.
    made([(place, b"\x0f\xff\xff\x03") for place in range(at + 24, at + size - 8, 16)])
    for _ in range(20):
        made([(at + dice.randrange(size), dice.randbytes(dice.choice([1, 2, 4, 8]))) for _ in range(200)])
    file = os.open(changing, os.O_WRONLY)
    handshake.ready(folder=folder)
    while True:
        os.pwrite(file, dice.randbytes(size), at)
        os.pwrite(file, good[at:at + size], at)


gc.disable()
globals()[sys.argv[1]]()
