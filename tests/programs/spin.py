"""One function that uses the CPU all the time."""
import handshake


def busy():
    while True:
        pass


handshake.ready()
busy()
