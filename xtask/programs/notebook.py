"""Starts a kernel of Jupyter and lets it run cells for ever. Prints the kernel's pid."""
import json
import os

from jupyter_client import KernelManager

CELLS = [
    "import collections, json, re\ntext = ' '.join(f'word{n % 97} {n}' for n in range(3000))",
    "def count(text):\n    return collections.Counter(re.findall(r'[a-z]+[0-9]*', text))",
    "tables = [count(text) for _ in range(4)]\njson.dumps(tables[0].most_common(5))",
    "sorted((value, key) for table in tables for key, value in table.items())[:3]",
]


def main():
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(extra_arguments=["--HistoryManager.enabled=False"])
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=120)
    said = False
    try:
        while True:
            for cell in CELLS:
                client.execute_interactive(cell, timeout=120, output_hook=lambda message: None)
            if not said:
                said = True
                print("ready", manager.provisioner.pid, flush=True)
    finally:
        manager.shutdown_kernel(now=True)


main()
