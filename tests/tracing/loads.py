"""Processes that do a known thing, and what traces them here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from hwprobe.tracing.children import Interruption
from hwprobe.tracing.kernel import Kernel, look, offers
from hwprobe.tracing.order import Order, Site
from hwprobe.tracing.report import How, Report, Tool
from hwprobe.tracing.targets import Targets
from hwprobe.tracing.tools import trace

SLEEPS = "while True: time.sleep(0.02)"
BUSY = "while True: pass"
PAGES = 4096
# Touches so many pages that it has never touched, when it is told to.
TOUCHES = f"""
import mmap
space = mmap.mmap(-1, {PAGES} * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
space.madvise(mmap.MADV_NOHUGEPAGE)
sys.stdin.read(1)
for page in range({PAGES}):
    space[page * mmap.PAGESIZE] = 1
time.sleep(600)
"""
# Reads from a pipe that says something every third of a second.
READS = """
import threading
ours, theirs = os.pipe()
def write():
    while True:
        time.sleep(0.3)
        os.write(theirs, b"x")
threading.Thread(target=write, daemon=True).start()
while True: os.read(ours, 1)
"""


@contextmanager
def running(code: str, *, cpu: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that runs ``code`` until the end of the context, at most ten minutes; ready when this yields."""
    pin = "" if cpu is None else f"os.sched_setaffinity(0, {{{cpu}}})\n"
    text = f"import os, signal, sys, time\nsignal.alarm(600)\n{pin}print('ready', flush=True)\n{textwrap.dedent(code)}"
    command = [sys.executable, "-c", text]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)


def works(kernel: Kernel, tool: Tool, how: How) -> None:
    """Skip a test, with the reason, where a way does not work on this machine."""
    offer = next(offer for offer in offers(kernel) if (offer.tool, offer.how) == (tool, how))
    if not offer.possible:
        pytest.skip(f"{tool} by {how}: {offer.detail}")


def traced(
    tool: Tool,
    how: How,
    *pids: int,
    seconds: float = 1.0,
    threshold_ms: float = 100.0,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """By one way, or skipped with the reason where this machine does not have it."""
    kernel = look()
    works(kernel, tool, how)
    order = Order(tool=tool, how=how, seconds=seconds, threshold_ms=threshold_ms)
    return trace(order, Site(targets=Targets(pids), say=say), kernel, Interruption())
