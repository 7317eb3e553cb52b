"""What a thread's stacks can be: told by a trace function while it does the first turns of its work.

A thread's truth is a tree of callers: `nodes` has [parent, function, line, end line, column, end column], numbered from 1 on,
with 0 for the root; `leaves` has [node, function]; `functions` has [name, file, lines, first line of a generator or coroutine,
else 0]. What the interpreter calls wherever it stands (`ANYWHERE` of `truth_kinds.py`) is a root of its own.
"""
import inspect
import sys
import threading

import handshake
from truth_kinds import ANYWHERE

# asyncio's ways differ a little from turn to turn.
TRACED_TURNS = 4


class Truth:
    def __init__(self):
        self.traced = True
        self.functions = {}
        self.nodes = {}
        self.leaves = set()
        self.places = {}
        self.lines = []
        self.first_lines = []

    def function(self, code):
        key = (handshake.name_of(code), code.co_filename)
        if key not in self.functions:
            self.functions[key] = len(self.functions)
            self.lines.append(set())
            is_generator = code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR)
            self.first_lines.append(code.co_firstlineno if is_generator else 0)
        index = self.functions[key]
        if code not in self.places:
            self.places[code] = {}
            self.lines[index].update(place[0] for place in handshake.positions(code))
        return index

    def place(self, frame):
        code, at = frame.f_code, frame.f_lasti
        function = self.function(code)
        if at not in self.places[code]:
            self.places[code][at] = tuple(handshake.place_of(frame))
        return (function,) + self.places[code][at]

    def note(self, frame):
        callers = []
        caller = frame
        while handshake.name_of(caller.f_code) not in ANYWHERE and caller.f_back is not None:
            caller = caller.f_back
            callers.append(self.place(caller))
        node = 0
        for place in reversed(callers):
            node = self.nodes.setdefault((node,) + place, len(self.nodes) + 1)
        self.leaves.add((node, self.function(frame.f_code)))

    def tracer(self, frame, event, arg):
        """Notes each call; and each event of a generator or coroutine: up to 3.11 what throws into one that delegates resumes it behind
        the instruction that tells of a call (`_gen_throw`, Objects/genobject.c [v3.11.7])."""
        self.note(frame)
        return self.tracer if self.first_lines[self.function(frame.f_code)] else None

    def trace(self, depth=1):
        """Traces from here on: a greenlet, and a thread state that C code makes for each call, has its own trace function."""
        self.note(sys._getframe(depth))
        sys.settrace(self.tracer)

    def told(self):
        return {
            "functions": [
                [name, file, sorted(self.lines[index]), self.first_lines[index]]
                for (name, file), index in self.functions.items()
            ],
            "nodes": list(self.nodes),
            "leaves": sorted(self.leaves),
        }


THREAD = threading.local()


def trace_here():
    """The caller is a greenlet's first function."""
    if THREAD.truth.traced:
        THREAD.truth.trace(2)


def drive(work, traced):
    """Runs the work for ever; calls `traced` with the truth once it is known."""
    truth = THREAD.truth = Truth()
    turn = 0
    while True:
        if turn == 0:
            truth.trace(1)
        elif turn == TRACED_TURNS:
            sys.settrace(None)
            truth.traced = False
            traced(truth.told())
        for part in work:
            part()
        turn += 1
