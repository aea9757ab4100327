"""Whether a long run keeps what it takes: memory, threads, descriptors, shared memory and temporary files over time.

    python -m benchmarks.soak --minutes 60            FrozenLake in one control process, sampled every 30 s
    python -m benchmarks.soak --minutes 5 --every 5   a look
    python -m benchmarks.soak --json                  one JSON object instead of the table

The job is the quick start without a target or a last step: it goes on learning, evaluating, checkpointing and swapping
weights. It is watched from outside, in /proc. After a warm-up (a quarter of the time) a line is fitted to every series;
one *grows* if the 95% interval of its slope lies above zero and the growth it stands for is more than ``TOLERANCE`` an
hour; else it is *flat*. Memory is what is resident, and of that what no file backs: the share of common libraries that
PSS counts would change with whatever else the machine runs. Exit status 1: something grows. Shared memory is
whatever appears in /dev/shm: beside other users of it, mount one of its own first (docs/benchmarks.md shows how).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "examples" / "frozenlake.yaml"
SHARED_MEMORY = Path("/dev/shm")
START_S = 300.0
STOP_S = 60.0
WARM_UP = 0.25
TOLERANCE = {
    "MB": 10.0,
    "threads": 1.0,
    "descriptors": 2.0,
    "files": 2.0,
    "tasks": 2.0,
    "entries": 20.0,
    "objects": 20_000.0,
}
"""Growth an hour that is let pass, by unit."""


class Series(msgspec.Struct):
    """One figure over time."""

    name: str
    unit: str
    seconds: list[float] = []
    values: list[float] = []


class Verdict(msgspec.Struct, frozen=True):
    """A series' line."""

    name: str
    unit: str
    first: float  # after the warm-up
    last: float
    most: float  # at any time
    an_hour: float  # slope
    plus_minus: float  # 95%
    flat: bool


class SoakFailed(RuntimeError):
    """The run did not last; the message has its last words."""


def slope(seconds: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Least squares: slope an hour, and half its 95% interval. Consecutive samples are alike, so they count for fewer:
    n (1 - r) / (1 + r), with r their residuals' correlation at lag one."""
    n = len(seconds)
    if n < 4:
        return math.nan, math.inf
    hours = [second / 3600 for second in seconds]
    middle, mean = statistics.fmean(hours), statistics.fmean(values)
    spread = sum((hour - middle) ** 2 for hour in hours)
    gradient = sum((hour - middle) * (value - mean) for hour, value in zip(hours, values, strict=True)) / spread
    rest = [value - mean - gradient * (hour - middle) for hour, value in zip(hours, values, strict=True)]
    square = sum(error**2 for error in rest)
    if square == 0.0:
        return gradient, 0.0
    alike = sum(a * b for a, b in itertools.pairwise(rest)) / square
    alike = min(max(alike, 0.0), 0.95)
    free = max(n * (1 - alike) / (1 + alike) - 2, 1.0)
    return gradient, (1.96 + 2.4 / free) * math.sqrt(square / free / spread)  # the t distribution, nearly


def lasting(series: Series, warm_up_s: float) -> bool:
    """Whether there is something to judge: not of a process that came and went before."""
    return bool(series.seconds) and series.seconds[-1] >= warm_up_s


def judge(series: Series, warm_up_s: float) -> Verdict:
    """Whether it grows."""
    kept = [(second, value) for second, value in zip(series.seconds, series.values, strict=True) if second >= warm_up_s]
    if not kept:
        raise SoakFailed(f"{series.name}: no sample after the warm-up of {warm_up_s:.0f} s; take more --minutes")
    gradient, half = slope([second for second, _ in kept], [value for _, value in kept])
    grows = gradient - half > 0 and gradient > TOLERANCE[series.unit]
    return Verdict(
        series.name, series.unit, kept[0][1], kept[-1][1], max(series.values), gradient, half, flat=not grows
    )


# ---- what is there to see -------------------------------------------------------------------------------------------


def processes(control: int) -> dict[str, int]:
    """Name to process id of the control process and everything below it; children are named by what they were told."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
    found = {"control": control}
    below = [control]
    while below:
        parent = below.pop()
        for pid in (pid for pid, above in parents.items() if above == parent):
            below.append(pid)
            found[_name(pid)] = pid
    return found


def _name(pid: int) -> str:
    """What a child was told to be, or the module that it runs: one that comes and goes keeps its name."""
    with contextlib.suppress(OSError, ValueError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        for word in words:
            if word.startswith(b'{"name"'):
                return str(json.loads(word)["name"])
        for before, word in itertools.pairwise(words):
            if before == b"-m" or before.endswith(b"/launch.py"):
                return word.decode().rpartition(".")[2]
    return f"process {pid}"


def figures(pid: int) -> Iterator[tuple[str, str, float]]:
    """What one process takes: (what, unit, value)."""
    memory = dict(_lines(Path(f"/proc/{pid}/smaps_rollup")))
    status = dict(_lines(Path(f"/proc/{pid}/status")))
    yield "anonymous", "MB", float(memory["Anonymous"].split()[0]) / 1024
    yield "RSS", "MB", float(memory["Rss"].split()[0]) / 1024
    yield "threads", "threads", float(status["Threads"])
    yield "descriptors", "descriptors", float(len(os.listdir(f"/proc/{pid}/fd")))


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    for line in path.read_text().splitlines():
        name, colon, value = line.partition(":")
        if colon:
            yield name, value.strip()


class Watched(msgspec.Struct, frozen=True):
    """A run, from outside."""

    process: subprocess.Popen[bytes]
    output: Path
    temporary: Path
    shared_before: set[str]

    def left_behind(self) -> list[str]:
        """Temporary files and shared memory that are there now."""
        files = [str(path) for path in self.temporary.rglob("*") if path.is_file()]
        return files + sorted(_shared_memory() - self.shared_before)

    def last_words(self) -> str:
        return " | ".join(self.output.read_text(errors="replace").strip().splitlines()[-5:])


def _shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def look(run: Watched) -> Iterator[tuple[str, str, float]]:
    """Everything that is watched, now."""
    total = 0.0
    for name, pid in processes(run.process.pid).items():
        with contextlib.suppress(OSError, KeyError):  # it has just ended
            for what, unit, value in list(figures(pid)):
                total += value if what == "anonymous" else 0.0
                yield f"{name} {what}", unit, value
    yield "all anonymous", "MB", total
    yield "temporary files", "files", float(sum(path.is_file() for path in run.temporary.rglob("*")))
    yield "shared memory", "files", float(len(_shared_memory() - run.shared_before))


# ---- the run --------------------------------------------------------------------------------------------------------


def soak(minutes: float, every_s: float, engine: str, directory: Path) -> tuple[list[Series], int, list[str]]:
    """Run it; returns the series, the number of steps made and what it left behind."""
    temporary = directory / "tmp"
    temporary.mkdir()
    shared_before = _shared_memory()
    words = [
        *(sys.executable, "-m", "coordinator.commands.train", str(JOB), f"rollout.engine={engine}"),
        *("train.steps=10000000", "evaluation.target=null", "--runs", str(directory / "runs")),
    ]
    output = directory / "output"
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    with output.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file, env=settings, cwd=directory, start_new_session=True)
    run = Watched(process, output, temporary, shared_before)
    try:
        _wait_for_a_step(run)
        series = _sampled(run, minutes * 60, every_s)
        process.send_signal(signal.SIGINT)
        if process.wait(STOP_S) != 130:
            raise SoakFailed(f"exit status {process.returncode}: {run.last_words()}")
    finally:
        process.kill()
        process.wait()
    return series, output.read_text(errors="replace").count("\nstep "), run.left_behind()


def _wait_for_a_step(run: Watched) -> None:
    deadline = time.monotonic() + START_S
    while "\nstep " not in run.output.read_text(errors="replace"):
        if run.process.poll() is not None or time.monotonic() > deadline:
            raise SoakFailed(f"no step within {START_S:g} s: {run.last_words()}")
        time.sleep(0.5)


def _sampled(run: Watched, duration_s: float, every_s: float) -> list[Series]:
    series: dict[str, Series] = {}
    start = time.monotonic()
    while (now := time.monotonic() - start) < duration_s:
        if run.process.poll() is not None:
            raise SoakFailed(f"ended after {now:.0f} s: {run.last_words()}")
        for name, unit, value in look(run):
            kept = series.setdefault(name, Series(name, unit, [], []))
            kept.seconds.append(now)
            kept.values.append(value)
        time.sleep(max(0.0, every_s - (time.monotonic() - start - now)))
    return list(series.values())


# ---- what is said ---------------------------------------------------------------------------------------------------


def table(verdicts: Sequence[Verdict]) -> str:
    """One line a series."""
    head = f"{'':<26}{'first':>10}{'last':>10}{'most':>10}  {'an hour':>22}"
    rows = [head]
    for verdict in verdicts:
        growth = f"{verdict.an_hour:+.1f} ± {verdict.plus_minus:.1f} {verdict.unit}"
        word = "flat" if verdict.flat else "GROWS"
        rows.append(
            f"{verdict.name:<26}{verdict.first:>10.1f}{verdict.last:>10.1f}{verdict.most:>10.1f}  {growth:>22}  {word}"
        )
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=30.0, metavar="SECONDS", help="between two samples")
    parser.add_argument("--engine", choices=["torch", "vllm"], default="torch")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="rollart-soak-") as directory:
        series, steps, left = soak(arguments.minutes, arguments.every, arguments.engine, Path(directory))
    warm_up_s = arguments.minutes * 60 * WARM_UP
    verdicts = [judge(one, warm_up_s) for one in series if one.name.startswith("control") or lasting(one, warm_up_s)]
    flat = all(verdict.flat for verdict in verdicts) and not left
    if arguments.json:
        facts = {"minutes": arguments.minutes, "engine": arguments.engine, "steps": steps, "left": left, "flat": flat}
        facts |= {"verdicts": [msgspec.to_builtins(verdict) for verdict in verdicts]}
        print(json.dumps({**facts, "samples": [msgspec.to_builtins(one) for one in series]}))
    else:
        print(table(verdicts))
        print(f"{steps} steps in {arguments.minutes:g} minutes; left behind: {', '.join(left) or 'nothing'}")
        print("verdict: flat" if flat else "verdict: NOT flat")
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
