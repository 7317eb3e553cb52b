"""Uses the CPU all the time, most of it in a few functions of the interpreter that are written in C."""
import handshake

VALUES = list(range(2_000))


def busy():
    while True:
        ", ".join(map(str, sorted(VALUES, key=hash)))


handshake.ready()
busy()
