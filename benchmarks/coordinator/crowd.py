"""More work than a machine has cores for: processes that only compute, and how many threads want to run.

Invariant: they run at the priority of whoever starts them, and none outlives it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOG = """
import os
parent = int({parent})
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def hogs(count: int) -> Iterator[None]:
    """So many threads that always want to run."""
    words = [sys.executable, "-S", "-c", HOG.format(parent=os.getpid())]
    running = [subprocess.Popen(words, stdin=subprocess.DEVNULL) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


def runnable() -> int:
    """Threads of the whole machine that run or want to, now."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
