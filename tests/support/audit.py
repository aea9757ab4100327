"""An auditor of ``ledger.jsonl``: replays what became of every ticket, by rules of its own, from plain JSON.

admitted -> stored -> trained         in the order of the file; every training makes the next version
    \\          \\-> evicted, lost
     \\-> lost, evicted
resumed: the versions beyond it are undone; what it names is stored, all else that has not ended is lost at once
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class BooksDoNotAddUp(AssertionError):
    """A line that no honest ledger can hold; the message has its number."""


class Audit:
    """The state after all lines."""

    def __init__(self) -> None:
        self.state: dict[str, str] = {}
        self.trained: dict[str, int] = {}  # ticket -> the version that it was trained into, in the history that counts
        self.lost: Counter[str] = Counter()
        self.evicted: Counter[str] = Counter()
        self.version = 0
        self.resumes = 0
        self._ends: dict[str, tuple[Counter[str], str]] = {}
        self._owed: set[str] = set()  # what a resume must yet say to be lost

    def read(self, line: dict[str, Any]) -> None:
        event, tickets = line["event"], line["tickets"]
        if len(set(tickets)) != len(tickets):
            raise BooksDoNotAddUp(f"a ticket is named twice: {line}")
        if self._owed and event != "lost":
            raise BooksDoNotAddUp(f"resumed without a word on {sorted(self._owed)}")
        getattr(self, f"_{event}")(line, tickets)

    def _admitted(self, line: dict[str, Any], tickets: list[str]) -> None:
        for ticket in tickets:
            if ticket in self.state:
                raise BooksDoNotAddUp(f"{ticket} is admitted again")
            self.state[ticket] = "admitted"

    def _stored(self, line: dict[str, Any], tickets: list[str]) -> None:
        for ticket in tickets:
            self._move(ticket, {"admitted"}, "stored")

    def _trained(self, line: dict[str, Any], tickets: list[str]) -> None:
        if line["version"] != self.version + 1:
            raise BooksDoNotAddUp(f"version {line['version']} follows version {self.version}")
        self.version = line["version"]
        for ticket in tickets:
            self._move(ticket, {"stored"}, "trained")
            self.trained[ticket] = self.version

    def _lost(self, line: dict[str, Any], tickets: list[str]) -> None:
        for ticket in tickets:
            self._move(ticket, {"undone"} if self._owed else {"admitted"}, "lost")
            self._owed.discard(ticket)
            self._end(ticket, self.lost, line["reason"])

    def _evicted(self, line: dict[str, Any], tickets: list[str]) -> None:
        for ticket in tickets:
            self._move(ticket, {"admitted", "stored"}, "evicted")
            self._end(ticket, self.evicted, line["reason"])

    def _ruled(self, line: dict[str, Any], tickets: list[str]) -> None:
        if tickets:
            raise BooksDoNotAddUp(f"an order that names tickets: {line}")

    def _resumed(self, line: dict[str, Any], tickets: list[str]) -> None:
        self.resumes += 1
        self.version = line.get("version", -1)
        for ticket, version in list(self.trained.items()):
            if version > self.version:
                del self.trained[ticket]
                self.state[ticket] = "undone"
        for ticket, state in self.state.items():
            if state in ("admitted", "stored"):
                self.state[ticket] = "undone"
        for ticket in tickets:
            self._move(ticket, {"undone", "lost", "evicted"}, "stored")
            if ticket in self._ends:
                counter, reason = self._ends.pop(ticket)
                counter[reason] -= 1
        self._owed = {ticket for ticket, state in self.state.items() if state == "undone"}

    def _move(self, ticket: str, origins: set[str], to: str) -> None:
        if self.state.get(ticket) not in origins:
            raise BooksDoNotAddUp(f"{ticket} is {self.state.get(ticket)} and cannot become {to}")
        self.state[ticket] = to

    def _end(self, ticket: str, counter: Counter[str], reason: str) -> None:
        if not reason:
            raise BooksDoNotAddUp(f"{ticket} ended without a reason")
        counter[reason] += 1
        self._ends[ticket] = (counter, reason)

    def close(self) -> None:
        if self._owed:
            raise BooksDoNotAddUp(f"resumed without a word on {sorted(self._owed)}")

    def open(self, state: str) -> list[str]:
        """The tickets that are in this state."""
        return [ticket for ticket, now in self.state.items() if now == state]


def audited(lines: Iterable[dict[str, Any]]) -> Audit:
    """Raises ``BooksDoNotAddUp``."""
    audit = Audit()
    for number, line in enumerate(lines, start=1):
        try:
            audit.read(line)
        except BooksDoNotAddUp as error:
            raise BooksDoNotAddUp(f"line {number}: {error}") from None
    audit.close()
    return audit


def audited_file(path: Path) -> Audit:
    """Of a file whose writer may have been killed: the end may be torn, and a resume may have no end."""
    return audited(json.loads(line) for line in path.read_text().split("\n")[:-1])
