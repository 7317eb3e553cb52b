"""Runs in CPython 3.15: writes the samples of TACH files again with its own writer. Prints the bytes of samples that its
files have, in the order of the files.
"""
import json
import struct
import sys

import _remote_debugging


class Again:
    def __init__(self, writer):
        self.writer = writer

    def collect(self, interpreters, timestamps):
        for timestamp in timestamps:
            self.writer.write_sample(interpreters, timestamp)


def sample_bytes(file):
    with open(file, "rb") as opened:
        header = opened.read(64)
    start, interval = struct.unpack_from("<QQ", header, 12)
    out = file + ".again"
    compression = struct.unpack_from("<I", header, 56)[0]
    with _remote_debugging.BinaryReader(file) as reader:
        writer = _remote_debugging.BinaryWriter(out, interval, start, compression=compression)
        reader.replay(Again(writer))
        writer.finalize()
    with open(out, "rb") as opened:
        opened.seek(40)
        return struct.unpack("<Q", opened.read(8))[0] - 64


print(json.dumps([sample_bytes(file) for file in sys.argv[1:]]))
