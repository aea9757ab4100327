"""Which files of a run directory are worth sending, and how much of each.

Invariant: only files that are named here are read: never weights, trajectories, key files, or what a user put there.
What is left of a file that is too long is its end, from a whole line on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from coordinator.bundle.redaction import Redactor
from coordinator.observe.lines import read_lines
from coordinator.observe.records import EvalRecord, StepRecord, decode_metric
from coordinator.scheduling.journal import Event, read_losses

PATTERNS = (
    "job.yaml",
    "job_directory",
    "from_dump",
    "demonstrations",
    "owner.lock",
    "coordinator.address",
    "audit.jsonl",
    "metrics.jsonl",
    "metrics.aside.jsonl",
    "timeline.jsonl",
    "ledger.jsonl",
    "logs/*.log",
    "logs/*.out",
    "failed-batches/*/failure.json",
    "checkpoints/*/run.json",
)
MOST_BYTES = 4 * 1024 * 1024
"""Of each file."""


class Collected(msgspec.Struct, frozen=True):
    """One file of the bundle."""

    name: str  # in the bundle
    data: bytes
    note: str = ""  # what is not in it, and why


def run_files(directory: Path, redactor: Redactor, most: int = MOST_BYTES) -> Iterator[Collected]:
    """The files of a run, dead or alive, then a list of all that lies there and a summary."""
    with suppress(OSError):  # it is reported below
        redactor.learn((directory / "job.yaml").read_text(errors="replace"))
    for pattern in PATTERNS:
        for path in sorted(directory.glob(pattern)):
            if path.is_file() and not path.is_symlink():
                yield _file(path, f"run/{path.relative_to(directory)}", redactor, most)
    yield Collected("run/files.txt", listing(directory).encode())
    yield Collected("run/summary.json", msgspec.json.format(msgspec.json.encode(summary(directory))) + b"\n")


def _file(path: Path, name: str, redactor: Redactor, most: int) -> Collected:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - most))
            data = file.read(most)
    except OSError as error:
        return Collected(name, b"", f"not read: {error.strerror}")
    notes = []
    if size > most:
        data = data[data.find(b"\n") + 1 :]
        notes.append(f"the last {len(data)} of {size} bytes")
    text, taken_out = redactor.clean(data.decode("utf-8", "backslashreplace"))
    if taken_out:
        notes.append(f"{taken_out} secrets left out")
    return Collected(name, text.encode(), "; ".join(notes))


def listing(directory: Path) -> str:
    """Every file with its size and age, as the summary of what is there but not in the bundle."""
    lines = []
    for path in sorted(directory.rglob("*")):
        try:
            facts = path.lstat()
        except OSError:  # gone since it was listed
            continue
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts.st_mtime))
        lines.append(f"{facts.st_size:>14}  {when}  {path.relative_to(directory)}{'/' if path.is_dir() else ''}")
    return "\n".join(lines) + "\n"


class RunSummary(msgspec.Struct, frozen=True):
    """How far a run came, from what it left."""

    steps: int
    last_step: StepRecord | None
    last_evaluation: EvalRecord | None
    tickets: dict[str, int]  # how often each event stands in the ledger's journal, by tickets
    lost: dict[str, int]  # by reason
    lost_details: dict[str, str]  # reason -> what the last such loss said
    unreadable_lines: int


def summary(directory: Path) -> RunSummary:
    """Also of a run that is writing."""
    metrics = read_lines(directory / "metrics.jsonl", decode_metric)
    steps = [record for record in metrics.records if isinstance(record, StepRecord)]
    evaluations = [record for record in metrics.records if isinstance(record, EvalRecord)]
    journal = read_lines(directory / "ledger.jsonl", lambda line: msgspec.json.decode(line, type=Event))
    tickets: Counter[str] = Counter()
    for event in journal.records:
        tickets[event.event] += len(event.tickets)
    losses = read_losses(directory / "ledger.jsonl")
    return RunSummary(
        steps=len(steps),
        last_step=steps[-1] if steps else None,
        last_evaluation=evaluations[-1] if evaluations else None,
        tickets=dict(tickets),
        lost=losses.counts,
        lost_details=losses.details,
        unreadable_lines=metrics.unreadable + journal.unreadable,
    )
