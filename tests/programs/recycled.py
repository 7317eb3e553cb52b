"""2,000 code objects of one template, each compiled, run for 0.7 ms and dropped: the next takes its memory.

Page N is function `render_N` of file `page_N.html`, first line N % 7 + 1 (a name's digits are padded: all are of one size).
"""
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


handshake.ready(pages=PAGES)
input()
for page in range(PAGES):
    render(page)
print("done", flush=True)
handshake.until_closed()
