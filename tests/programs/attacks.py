"""What an ordinary user's programs can do to a profiler of the whole host. The first argument says which, the second is a
folder that belongs to this user.

The programs that lie about their memory are in `hostile.py`, those whose pages never come in `never.py`.
"""
import ctypes
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
import time

import handshake
from never import become_nobody, check, find, word

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
CODE = mmap.PROT_READ | mmap.PROT_EXEC
PAGE = mmap.PAGESIZE
PR_SET_NAME, PR_SET_MM, PR_SET_MM_MAP = 15, 35, 14


def spin():
    while True:
        pass


def until_alarm():
    signal.alarm(120)


def children(count, work):
    """This program and so many like it."""
    parent = os.getpid()
    for number in range(1, count):
        if os.fork() == 0:
            until_alarm()
            LIBC.prctl(1, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(0)
            work(number)
            os._exit(0)
    handshake.ready()
    work(0)


def long_names(_folder):
    """24 programs, each with 500 functions whose names have 60,000 letters, each of which is called in turn."""
    def work(number):
        functions = []
        for index in range(500):
            def named():
                for _ in range(300):
                    pass

            name = f"f{number}_{index}_" + "n" * 60_000
            replaced = {"co_name": name}
            if hasattr(named.__code__, "co_qualname"):
                replaced["co_qualname"] = name
            named.__code__ = named.__code__.replace(co_filename=f"/{name}.py", **replaced)
            functions.append(named)
        while True:
            for function in functions:
                function()

    # What it takes of the processors is not the point.
    os.nice(5)
    children(24, work)


def new_names(_folder):
    """Functions without end, each new, with a long name, and called once."""
    def work(number):
        index = 0
        while True:
            index += 1
            def named():
                for _ in range(300):
                    pass

            name = f"f{number}_{index}_" + "n" * 3_900
            named.__code__ = named.__code__.replace(co_name=name, co_filename=f"/{name}.py")
            named()

    children(8, work)


def own_library():
    """A small ELF file with code, of this machine."""
    folder = "/usr/lib/" + os.uname().machine + "-linux-gnu"
    for name in ("libutil.so.1", "libdl.so.2", "libanl.so.1", "libpthread.so.0"):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            with open(path, "rb") as file:
                return file.read()
    raise FileNotFoundError(folder)


def with_section(library, name, content):
    """The file with one more section, and without a build id."""
    data = bytearray(library)
    table, = struct.unpack_from("<Q", data, 0x28)
    size, count, strings = struct.unpack_from("<3H", data, 0x3A)
    sections = [bytearray(data[table + at * size : table + (at + 1) * size]) for at in range(count)]
    text_at, text_len = struct.unpack_from("<2Q", sections[strings], 24)
    text = bytes(data[text_at : text_at + text_len])
    name_at = len(text)
    text += name + b"\0"
    # A note of another type is no build id.
    note = text.find(b".note.gnu.build-id")
    for section in sections:
        if struct.unpack_from("<I", section)[0] == note:
            struct.pack_into("<I", section, 4, 1)
    headers, = struct.unpack_from("<Q", data, 0x20)
    entry, entries = struct.unpack_from("<2H", data, 0x36)
    for at in range(headers, headers + entry * entries, entry):
        if struct.unpack_from("<I", data, at)[0] == 4:
            struct.pack_into("<I", data, at, 0)
    content_at = len(data)
    data += content
    text_at = len(data)
    data += text
    data += bytes(-len(data) % 8)
    struct.pack_into("<2Q", sections[strings], 24, text_at, len(text))
    sections.append(bytearray(struct.pack("<IIQQQQIIQQ", name_at, 1, 0, 0, content_at, len(content), 0, 0, 4, 0)))
    struct.pack_into("<Q", data, 0x28, len(data))
    struct.pack_into("<H", data, 0x3C, len(sections))
    return bytes(data) + b"".join(sections)


def map_code(path):
    file = os.open(path, os.O_RDONLY)
    address = LIBC.mmap(None, 4 * PAGE, CODE, mmap.MAP_PRIVATE, file, 0)
    os.close(file)
    assert address not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    return address


def debug_links(folder):
    """400 small libraries that name a debug file of 256 MiB without content, whose checksum tells whether it is theirs."""
    with open(os.path.join(folder, "all.debug"), "wb") as file:
        file.truncate(256 << 20)
    library = own_library()
    for number in range(400):
        path = os.path.join(folder, f"lib{number}.so")
        name = b"all.debug\0\0\0"
        with open(path, "wb") as file:
            file.write(with_section(library, b".gnu_debuglink", name + struct.pack("<I", number)))
        map_code(path)
    handshake.ready()
    spin()


def odd_debug_links(folder):
    """Libraries whose debug files are a FIFO, a device, a folder, a link to what only root may read, and one that is no end."""
    links = {"fifo.debug": os.mkfifo, "zero.debug": lambda path: os.symlink("/dev/zero", path),
             "shadow.debug": lambda path: os.symlink("/etc/shadow", path),
             "loop.debug": lambda path: os.symlink(path, path), "folder.debug": os.mkdir,
             "self.debug": lambda path: os.symlink("/proc/self/mem", path)}
    for name, make in links.items():
        make(os.path.join(folder, name))
        path = os.path.join(folder, name.replace(".debug", ".so"))
        link = name.encode() + b"\0"
        link += bytes(-len(link) % 4)
        with open(path, "wb") as file:
            file.write(with_section(own_library(), b".gnu_debuglink", link + struct.pack("<I", 7)))
        map_code(path)
    handshake.ready()
    spin()


def many_mappings(folder):
    """50,000 pieces of executable memory, as many as a process may have."""
    path = os.path.join(folder, "code")
    with open(path, "wb") as file:
        file.write(own_library() + bytes(1 << 16))
    file = os.open(path, os.O_RDONLY)
    for number in range(50_000):
        # The same page again and again: the kernel joins none of them.
        address = LIBC.mmap(None, PAGE, CODE, mmap.MAP_PRIVATE, file, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            break
    handshake.ready(mappings=number)
    spin()


def large_symbols(folder):
    """Libraries with symbol tables as large as one may be, each of which runs."""
    source = os.path.join(folder, "large.c")
    with open(source, "w") as file:
        file.write("int work(int n) { volatile int i = 0; while (i < n) i++; return i; }\n")
    small = os.path.join(folder, "small.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wl,--build-id=none", "-s", "-o", small, source], check=True)
    with open(small, "rb") as file:
        library = file.read()
    # 24 bytes for each symbol, all of them in the text.
    text = find_text(library)
    count = (60 << 20) // 24
    names = b"\0" + b"".join(b"f%07d\0" % (number % 1000) for number in range(1000)) + bytes(60 << 20)
    entries = b"".join(
        struct.pack("<IBBHQQ", 1 + 9 * number, 0x12, 0, 1, text + number % 256, 1) for number in range(1000))
    entries *= count // 1000
    loaded = []
    for number in range(6):
        path = os.path.join(folder, f"large{number}.so")
        with open(path, "wb") as file:
            file.write(with_symbols(library, entries, names))
        loaded.append(ctypes.CDLL(path))
    handshake.ready()
    while True:
        for library in loaded:
            library.work(300_000)


def find_text(library):
    headers, = struct.unpack_from("<Q", library, 0x20)
    entry, entries = struct.unpack_from("<2H", library, 0x36)
    for at in range(headers, headers + entry * entries, entry):
        kind, flags, _offset, address = struct.unpack_from("<IIQQ", library, at)
        if kind == 1 and flags & 1:
            return address
    raise LookupError("no code")


def with_symbols(library, symbols, names):
    data = bytearray(library)
    data += bytes(-len(data) % 8)
    symbols_at = len(data)
    names_at = symbols_at + len(symbols)
    table = names_at + len(names)
    section = lambda *fields: struct.pack("<IIQQQQIIQQ", *fields)
    sections = section(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    sections += section(0, 2, 0, 0, symbols_at, len(symbols), 2, 0, 8, 24)
    sections += section(0, 3, 0, 0, names_at, len(names), 0, 0, 1, 0)
    struct.pack_into("<Q", data, 0x28, table + (-table % 8))
    struct.pack_into("<HHH", data, 0x3A, 64, 3, 2)
    return bytes(data) + symbols + names + bytes(-table % 8) + sections


def long_command_line(_folder):
    """A command line of 800 MB, which is one page mapped many times by its own account."""
    size = 800 << 20
    LIBC.mmap.restype = ctypes.c_void_p
    start = LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, -1, 0)
    ctypes.memset(start, ord("a"), 1 << 20)
    fields = {}
    with open("/proc/self/stat") as file:
        stat = file.read().rsplit(")", 1)[1].split()
    # proc(5): the fields from the third on.
    start_code, end_code, start_stack = int(stat[23]), int(stat[24]), int(stat[25])
    start_data, end_data, start_brk = (int(stat[at]) for at in (42, 43, 44))
    brk = LIBC.sbrk
    brk.restype = ctypes.c_void_p
    now = brk(0)
    layout = struct.pack("<11QQIi", start_code, end_code, start_data, end_data, start_brk, now, start_stack, start,
                         start + size - 1, start, start + size - 1, 0, 0, -1)
    buffer = ctypes.create_string_buffer(layout, len(layout))
    try:
        check(LIBC.prctl(PR_SET_MM, PR_SET_MM_MAP, buffer, ctypes.c_ulong(len(layout)), 0))
        told = True
    except OSError as error:
        told = str(error)
    handshake.ready(told=told)
    spin()


def exec_chain(folder):
    """A program that is another one every 300 ms, each with as many functions with long names as it can make."""
    script = os.path.join(folder, "next.py")
    with open(script, "w") as file:
        file.write(EXECS)
    if os.fork() == 0:
        until_alarm()
        LIBC.prctl(1, signal.SIGKILL)
        os.execv(sys.executable, [sys.executable, "-B", script])
    handshake.ready()
    spin()


EXECS = '''
import os, sys, time
end = time.monotonic() + 0.3
number = 0
while time.monotonic() < end:
    number += 1
    scope = {}
    name = f"f{number:08}_" + "x" * 3900
    exec(compile(f"def {name}():\\n" + "    for _ in range(2000): pass\\n", f"/{number}" + "d" * 3900, "exec"), scope)
    scope[name]()
os.execv(sys.executable, [sys.executable, "-B", __file__])
'''


def storm(_folder):
    """Forks and execs as fast as it can."""
    from hostile import storm as forks
    until_alarm()
    forks()


def threads(_folder):
    """As many threads as this user may have, up to 17,000, which change their names all the time."""
    threading.stack_size(32 * 1024)
    gate = threading.Event()
    started = 0
    try:
        for _ in range(17_000):
            threading.Thread(target=gate.wait, daemon=True).start()
            started += 1
    except (RuntimeError, MemoryError):
        pass
    handshake.ready(threads=started)
    number = 0
    while True:
        number += 1
        LIBC.prctl(PR_SET_NAME, b"\x1b[2J%d" % (number % 1000), 0, 0, 0)


def names_unreadable(_folder):
    """Functions without end whose names are in no memory."""
    def work(_number):
        index = 0
        while True:
            index += 1
            def named():
                for _ in range(20_000):
                    pass

            named.__code__ = code = named.__code__.replace(co_name="".join(["u", str(index)]))
            held = getattr(code, "co_qualname", code.co_name)
            places = [find(id(code), id(name)) for name in (code.co_name, held, code.co_filename)]
            before = [word(place).value for place in places]
            for place in places:
                word(place).value = 0x1000
            named()
            for place, value in zip(places, before):
                word(place).value = value

    children(2, work)


def perf_map(folder):
    """A map of generated code in /tmp that is a FIFO, and memory that wants it."""
    for path in (f"/tmp/perf-{os.getpid()}.map",):
        try:
            os.mkfifo(path)
        except FileExistsError:
            pass
    size = 16 * PAGE
    LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    handshake.ready()
    spin()


def perf_map_always_new(_folder):
    """Eight programs that run code in memory of no file, and whose maps, the largest that are read whole, are never the same twice."""
    # `mov rax, rdi; dec rax; jnz -5; ret`.
    loop = bytes.fromhex("4889f848ffc875fbc3")

    def work(number):
        size = 16 * PAGE
        mapped = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        mapped[: len(loop)] = loop
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        called = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long)(address)
        # Beside the code: it stays without a name, and is asked for.
        lines = "".join(f"{address + size + 16 * at:x} 10 {at}_{'n' * 90}\n" for at in range(70_000))
        path = f"/tmp/perf-{os.getpid()}.map"
        with open(path, "w") as told:
            told.write(lines)
        while True:
            called(20_000_000)
            os.utime(path)

    children(8, work)


def nested(_folder):
    """Threads and processes in as many pid namespaces, one in another, as the kernel allows."""
    depth = 0
    while depth < 40:
        if LIBC.unshare(0x10000000 | 0x20000000) != 0:
            break
        child = os.fork()
        if child:
            if depth == 0:
                handshake.ready()
            until_alarm()
            os.waitpid(child, 0)
            os._exit(0)
        depth += 1
    until_alarm()
    if depth == 0:
        handshake.ready()
    spin()


if __name__ == "__main__":
    become_nobody()
    globals()[sys.argv[1]](sys.argv[2])
