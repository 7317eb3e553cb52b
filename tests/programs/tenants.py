"""Code that differs where a hasty look does not see it, at addresses that were other code's.

Forked children make it after their fork, in the same steps, so each gets the same addresses (and the same versions) for
different code. The stack tells the truth: `tenant_K` calls what is tenant K's, `edition_N` what edition N of a module
has, and these callers were made before the fork and are never freed.

* `paths`: /.../tenant_K/.../plugin.py, imported: paths that differ in front.
* `names`: functions with long qualified names that differ in front.
* `lines`: functions of one name and file, with a gap of K lines in the middle.
* `reload`: a module that is edited and reloaded, N comment lines in the middle.
* `exec`: the same text, compiled and executed.

With an argument that many times as long.
"""
import importlib
import importlib.util
import os
import sys
import tempfile

import handshake

TENANTS = 3
EDITIONS = 5
TIMES = float(sys.argv[1]) if sys.argv[1:] else 1.0
clock = handshake.time.thread_time

# The first lines are dull and many: what differs comes after them. `hot` is where the time goes.
DULL = "    x = 0\n" + "    x = x + 1\n" * 30
HOT = "    end = clock() + seconds\n    while clock() < end: pass\n"
PLUGIN = "from handshake import time\nclock = time.thread_time\ndef plugin(seconds):\n" + HOT
NAMED = "class Class:\n  def {name}(seconds):\n" + HOT.replace("    ", "      ")
LINES = "def lines(seconds):\n" + DULL + "{gap}" + HOT
EDITED = "from handshake import time\nclock = time.thread_time\n" + LINES.replace("lines", "edited")

# Made once: what a frame is called from tells whose it is.
callers = {}
for caller in ["tenant_%d" % k for k in range(TENANTS)] + ["edition_%d" % n for n in range(EDITIONS)]:
    exec("def %s(function, seconds):\n    function(seconds)\n" % caller, callers)


def compiled(source, filename):
    names = {"clock": clock}
    exec(compile(source, filename, "exec"), names)
    return names


def plugin(path):
    spec = importlib.util.spec_from_file_location("plugin", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.plugin


def tenant(k, top):
    """The work of one child."""
    call = callers["tenant_%d" % k]
    call(plugin(path_of(top, k)), 0.25 * TIMES)
    # `co_qualname` (3.11) is `Class.NAME`, whose front would be the same.
    name = "t%d_%s" % (k, "n" * 60)
    source = NAMED.format(name=name).replace("Class", "Class%d" % k)
    call(getattr(compiled(source, "named.py")["Class%d" % k], name), 0.25 * TIMES)
    call(compiled(LINES.format(gap="\n" * k), "lines.py")["lines"], 0.25 * TIMES)


def path_of(top, k):
    return os.path.join(top, "tenant_%d" % k, "d" * 60, "plugin.py")


def edit(path, n):
    with open(path, "w") as file:
        file.write(EDITED.format(gap="    # moved\n" * n))


def reload_(path, rounds):
    sys.path.insert(0, os.path.dirname(path))
    sys.dont_write_bytecode = True
    edit(path, 0)
    module = importlib.import_module("edited")
    for number in range(rounds):
        n = number % EDITIONS
        edit(path, n)
        module = importlib.reload(module)
        callers["edition_%d" % n](module.edited, 0.002)


def execute(rounds):
    names = {}
    for number in range(rounds):
        n = number % EDITIONS
        exec(compile(EDITED.format(gap="    # moved\n" * n), "executed.py", "exec"), names)
        callers["edition_%d" % n](names["edited"], 0.002)


def hot_line(source):
    return source.split("\n").index(HOT.split("\n")[0]) + 1


with tempfile.TemporaryDirectory() as top:
    for k in range(TENANTS):
        os.makedirs(os.path.dirname(path_of(top, k)))
        with open(path_of(top, k), "w") as file:
            file.write(PLUGIN)
    handshake.ready(top=top, lines=hot_line(LINES.format(gap="")), edited=hot_line(EDITED.format(gap="")))
    input()
    handshake.signal.alarm(int(120 + 30 * TIMES))
    children = []
    for k in range(TENANTS):
        pid = os.fork()
        if pid == 0:
            tenant(k, top)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    reload_(os.path.join(top, "edited.py"), int(120 * TIMES))
    execute(int(120 * TIMES))
print("done", flush=True)
handshake.until_closed()
