"""A thread in C code whose caller's code object cannot be read for most of the time: its page is taken away.

`big` is so big that its code object has pages of its own, and while `hash_long` hashes without the GIL, nothing in the
program reads it. `hash_long` returns only when the page is back.
"""
import ctypes
import gc
import hashlib
import threading

import handshake

PAGE = 4096
NONE, READ_WRITE = 0, 3
M_MMAP_THRESHOLD = -3
ROUNDS = 150_000

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mallopt(M_MMAP_THRESHOLD, 128 * 1024)
called, hidden, hashed, back = (threading.Semaphore(0) for _ in range(4))


def hash_long():
    called.release()
    hidden.acquire()
    hashlib.pbkdf2_hmac("sha256", b"password", b"salt", ROUNDS)
    hashed.release()
    back.acquire()


def protect(address, access):
    if libc.mprotect(address, PAGE, access) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


source = "def big(ends=False):\n    while not ends:\n        hash_long()\n    x = 0\n" + "    x = x + 1\n" * 20_000
names = {"hash_long": hash_long}
# The collector would look at the code object.
gc.disable()
exec(compile(source, "big.py", "exec"), names)
page = id(names["big"].__code__) & -PAGE
threading.Thread(target=names["big"], daemon=True).start()
handshake.ready()
while True:
    called.acquire()
    protect(page, NONE)
    hidden.release()
    hashed.acquire()
    protect(page, READ_WRITE)
    back.release()
