"""A process and all that it starts: seconds of CPU and memory over time, and what it wrote.

Invariant: nothing that was started here is left when ``watched`` returns, whatever happened.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

EVERY_S = 0.5


class Sample(msgspec.Struct, frozen=True):
    """One look at a family of processes."""

    time: float  # seconds since the epoch
    cpu_s: float  # user and system, of those alive and those gone
    memory_bytes: int  # proportional set sizes: pages that several share are counted once


class Watched(msgspec.Struct, frozen=True):
    """What a command did."""

    started: float  # seconds since the epoch
    output: str
    samples: list[Sample]

    def cpu_between(self, start: float, end: float) -> float:
        """Seconds of CPU spent between two moments, by the looks nearest to them."""
        near = [min(self.samples, key=lambda sample: abs(sample.time - moment)) for moment in (start, end)]
        span = near[1].time - near[0].time
        return (near[1].cpu_s - near[0].cpu_s) * (end - start) / span if span else float("nan")

    @property
    def peak_memory_bytes(self) -> int:
        return max((sample.memory_bytes for sample in self.samples), default=0)


class CommandFailed(RuntimeError):
    """A measured command did not end well; the message has the end of its output."""


def watched(words: Sequence[str], *, environment: Mapping[str, str], timeout_s: float, log: Path) -> Watched:
    """Run a command to its end. Raises ``CommandFailed``."""
    started = time.time()
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(words),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    family = _Family(process.pid)
    samples: list[Sample] = []
    try:
        while process.poll() is None:
            samples.append(family.look())
            if time.time() - started > timeout_s:
                raise CommandFailed(f"{' '.join(words[:4])} did not end within {timeout_s:g} s; see {log}")
            time.sleep(EVERY_S)
    finally:
        family.kill()
        process.wait()
    text = log.read_text(errors="replace")
    if process.returncode != 0:
        raise CommandFailed(f"{' '.join(words[:4])} ended with status {process.returncode}:\n{text[-3000:]}")
    return Watched(started, text, samples)


class _Family:
    """A process and its descendants, remembered once seen."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._cpu_s: dict[int, float] = {}

    def look(self) -> Sample:
        memory = 0
        for process in self._alive():
            try:
                times = process.cpu_times()
                self._cpu_s[process.pid] = times.user + times.system
                memory += _memory(process)
            except psutil.Error:  # it has ended meanwhile
                continue
        return Sample(time.time(), sum(self._cpu_s.values()), memory)

    def _alive(self) -> list[psutil.Process]:
        try:
            first = psutil.Process(self._pid)
            return [first, *first.children(recursive=True)]
        except psutil.Error:
            return []

    def kill(self) -> None:
        for process in reversed(self._alive()):
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue


def _memory(process: psutil.Process) -> int:
    """Proportional set size on Linux, resident size elsewhere."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return int(process.memory_info().rss)
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
