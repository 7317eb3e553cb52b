"""What the test servers share: a control file that tests write, and a file of what came."""
import json
import os
import sys
import threading


class Log:
    """One JSON object a line."""

    def __init__(self, path):
        self.file = open(path, "a", encoding="utf-8")
        self.lock = threading.Lock()

    def write(self, value):
        with self.lock:
            self.file.write(json.dumps(value) + "\n")
            self.file.flush()


def control(path):
    """What the test wants now; nothing, if it wants nothing."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


def ready(**ports):
    """Tells the test where the server listens."""
    print(json.dumps({**ports, "pid": os.getpid()}), flush=True)
    sys.stdout.close()
