"""2,000 code objects of one template, each compiled, run for 0.7 ms and dropped: the next takes its memory.

With an argument: by so many forked children, the first the first of each so many pages and so on. Each begins with the
same memory and the same versions, and the last line has their process ids. With `exec` by two programs that the process
runs one after the other, with the same addresses: the first the even pages, the second the odd ones.

Page N is function `render_N` of file `page_N.html`, first line N % 7 + 1 (a name's digits are padded: all are of one size).
"""
import os
import sys

import handshake

PAGES = 2000
TEMPLATE = """{1}def render_{0:05d}():
    end = clock() + 0.0007
    while clock() < end:
        pass
"""


def render(page):
    names = {"clock": handshake.time.thread_time}
    source = TEMPLATE.format(page, "\n" * (page % 7))
    exec(compile(source, "page_%05d.html" % page, "exec"), names)
    names["render_%05d" % page]()


def start(part, before):
    words = before + [sys.executable, __file__, "exec", part]
    os.execvpe(words[0], words, dict(os.environ, PYTHONHASHSEED="0"))


if len(sys.argv) < 3:
    handshake.ready(pages=PAGES)
    input()
children = []
if sys.argv[1:] == ["exec"]:
    start("0", ["setarch", "--addr-no-randomize"])
elif sys.argv[2:]:
    for page in range(int(sys.argv[2]), PAGES, 2):
        render(page)
    if sys.argv[2] == "0":
        start("1", [])
else:
    for child in range(int(sys.argv[1]) if sys.argv[1:] else 0):
        pid = os.fork()
        if pid == 0:
            for page in range(child, PAGES, int(sys.argv[1])):
                render(page)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    if not children:
        for page in range(PAGES):
            render(page)
print(children or "done", flush=True)
handshake.until_closed()
