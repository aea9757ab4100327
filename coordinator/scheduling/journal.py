"""The ledger's journal: one line for everything that ever happened to a ticket, in every sitting of a run.

Invariant: a transition is in the hands of the operating system before anything that follows from it is done or said,
so that after any crash ``ledger.jsonl`` tells how each ticket ended: the last line that names it counts, but for
trainings that a later ``resumed`` line took back (those that made versions beyond the one it went back to).

    {"event":"admitted","tickets":["t7"],"group":1,"task":12,"stream":"tasks"}
    {"event":"stored","tickets":["t7"],"version":3}             3: its initiating version
    {"event":"trained","tickets":["t7",...],"version":5}        5: the version that the step made
    {"event":"lost","tickets":["t8"],"reason":"env_failed","detail":"..."}
    {"event":"evicted","tickets":["t9"],"reason":"stale"}
    {"event":"resumed","tickets":["t7",...],"version":4,"group":9}
                              went back to version 4; these are buffered again; the next new group is the ninth
    {"event":"ruled","tickets":[],"alpha":2,"redundant_groups":0}
                              a person's order, until the sitting ends; likewise weights of task streams, a pause,
                              and how many places the run may use beside others
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from coordinator.observe.lines import LineWriter, whole_lines

EventKind = Literal["admitted", "stored", "trained", "lost", "evicted", "resumed", "ruled"]
MOST_DETAIL = 300


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """See the module docstring."""

    event: EventKind
    tickets: list[str]
    version: int = -1
    reason: str = ""
    detail: str = ""
    group: int = -1
    task: int = -1
    stream: str = ""
    alpha: int = -1
    redundant_groups: int = -1
    weights: dict[str, float] = {}
    paused: bool | None = None
    places: int = -1


class Journal(Protocol):
    """Where a ledger writes what happens."""

    def write(self, events: Sequence[Event]) -> None:
        """Returns once the crash of this process can no longer lose it. Raises ``OSError``."""

    def mark(self) -> int:
        """The end of what is written so far, which the machine's crash can no longer lose. Raises ``OSError``."""


class NoJournal:
    """For ledgers that nobody goes on from."""

    def write(self, events: Sequence[Event]) -> None:
        """Nothing is kept."""

    def mark(self) -> int:
        return 0


class FileJournal:
    """A ``Journal`` in a file."""

    def __init__(self, path: Path) -> None:
        """Raises ``OSError``."""
        self._writer = LineWriter(path)

    def write(self, events: Sequence[Event]) -> None:
        self._writer.write_all(events)

    def mark(self) -> int:
        return self._writer.sync()

    def close(self) -> None:
        self._writer.close()


def read_journal(path: Path, mark: int = 0) -> list[Event]:
    """What was written after a mark; empty for a file that is missing or not that long."""
    return read_on(path, mark)[0]


def read_on(path: Path, mark: int) -> tuple[list[Event], int]:
    """The same, and the mark behind it."""
    try:
        with path.open("rb") as file:
            file.seek(mark)
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return [], mark
    decoder = msgspec.json.Decoder(Event)
    return [decoder.decode(line) for line in lines], mark + sum(len(line) + 1 for line in lines)


class Losses(msgspec.Struct, frozen=True):
    """What ended without being trained on."""

    counts: dict[str, int]  # by reason
    details: dict[str, str]  # reason -> what the last such loss said, where it said anything


_ENDS = (b'{"event":"lost"', b'{"event":"evicted"', b'{"event":"resumed"')


def read_losses(path: Path) -> Losses:
    """In the history that counts; from the first line on, also while somebody writes."""
    reasons: dict[str, str] = {}
    details: dict[str, str] = {}
    for line in whole_lines(path):
        if not line.startswith(_ENDS):
            continue
        event = msgspec.json.decode(line, type=Event)
        for ticket in event.tickets:
            reasons.pop(ticket, None)
        if event.event != "resumed":
            reasons |= dict.fromkeys(event.tickets, event.reason)
        if event.detail:
            details[event.reason] = event.detail
    return Losses(dict(Counter(reasons.values())), details)
