"""What every side sends, and how it is driven: a line with a question on standard input, a line of JSON as the answer.

Invariant: all sides move the same 200-byte struct and the same 1 MB arrays between two processes with the same rules:
one message under way for a round trip; ``WINDOW`` for arrays; for one-way messages a wait for the receiver after every
``BURST``. For an object one process puts 64 MB and sends the handle, the other one gets it and answers with its size;
neither looks at the bytes, which costs a page fault for each page that is touched for the first time. ``OBJECTS_FIRST``
are not timed: fresh memory costs every side several times the copy, and Ray's store goes once through all that it has
(1 GB) before it uses any of it again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
BURST = 1_000
WINDOW = 8
TENSOR_BYTES = 1 << 20
OBJECT_BYTES = 64 << 20
OBJECTS_FIRST = 20
ANSWER_TIMEOUT_S = 120.0


class Sample(msgspec.Struct, frozen=True):
    """200 bytes of msgpack: what a turn's answer is made of."""

    request: str = "trajectory-00042.turn-07"
    engine: str = "engine-0"
    reason: str = "length"
    version: int = 123_456
    seconds: float = 0.123456789
    tokens: tuple[int, ...] = tuple(range(1000, 1016))
    scores: tuple[float, ...] = (0.5, 0.25, 0.125)


class Count(msgspec.Struct, frozen=True):
    """How many one-way messages have come."""

    count: int


class Tensor(msgspec.Struct, frozen=True):
    """One array."""

    values: np.ndarray


def tensor() -> np.ndarray:
    """float32, 1 MB."""
    return np.arange(TENSOR_BYTES // 4, dtype=np.float32)


Question = Callable[[int], list[float]]
"""Does something so many times; returns seconds, one for each or one in all."""


def answer(questions: Mapping[str, Question]) -> None:
    """Until standard input ends."""
    print("ready", flush=True)
    for line in sys.stdin:
        name, _, count = line.partition(" ")
        print(json.dumps(questions[name](int(count))), flush=True)


class SideFailed(RuntimeError):
    """A side ended; the message has its last words."""


class Side:
    """One side's client process, from outside."""

    def __init__(self, name: str, directory: Path) -> None:
        """``NAME_unix`` is the side ``NAME``, over Unix sockets."""
        directory.mkdir(parents=True, exist_ok=True)
        self.name = name
        self._log = directory / f"{name}.log"
        module, _, unix = name.partition("_")
        settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "BUS_BENCHMARK_UNIX": str(int(unix == "unix"))}
        with self._log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"benchmarks.bus.{module}_side"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **settings},
            )
        self._line("ready")

    def _line(self, start: str) -> str:
        if self._process.stdout is None:
            raise SideFailed(f"{self.name} was started without pipes")
        watchdog = threading.Timer(ANSWER_TIMEOUT_S, self._process.kill)
        watchdog.start()
        try:
            for line in self._process.stdout:
                if line.startswith(start):
                    return line
        finally:
            watchdog.cancel()
        how = f"ended, or did not answer within {ANSWER_TIMEOUT_S:g} s"
        raise SideFailed(f"the side {self.name!r} {how}:\n{self._log.read_text()[-3000:]}")

    def ask(self, name: str, count: int) -> list[float]:
        """Seconds."""
        if self._process.stdin is None:
            raise SideFailed(f"{self.name} was started without pipes")
        self._process.stdin.write(f"{name} {count}\n")
        self._process.stdin.flush()
        return [float(seconds) for seconds in json.loads(self._line("["))]

    def close(self) -> None:
        """End it; its own children end with their standard input."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
