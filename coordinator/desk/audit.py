"""Who changed what in a run: one line for each order in ``audit.jsonl`` of the run directory, refused ones included.

Invariant: no order is answered as done before its line is in the hands of the operating system; one that could not be
written down is not begun (a file that cannot be opened), or answered with an error that says so (a disk that is full).

    {"time":"2026-01-31T14:25:01.123+00:00","by":"ada@desk7","node":"admin-desk7-4711","key":"rq:rM>}U?@Lr",
     "order":"set alpha 2","before":"1","after":"2","result":"done"}

``node`` is the shell's node, which the bus lets speak only under a name that its key is good for; ``key`` is how that
key begins (its public half, as ``bin/keys show`` prints it), "" on loopback without keys. ``by`` is what the shell says
of its user: as good as the word of whoever has the key.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import msgspec

from bus.security import ClusterKey, SecurityError
from coordinator.observe.lines import LineWriter, read_lines

FILE = "audit.jsonl"


class AuditLine(msgspec.Struct, frozen=True, kw_only=True):
    """See the module docstring."""

    time: str
    by: str
    node: str
    key: str
    order: str
    before: str = ""
    after: str = ""
    result: str  # "done", or "refused: why"


class AuditLog:
    """The file; opened for each order, so that several processes may write to it one after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self) -> LineWriter:
        """For one order's line; to be closed. Raises ``OSError``."""
        return LineWriter(self._path)

    def newest(self, count: int) -> list[AuditLine]:
        """The last lines, oldest first."""
        lines = read_lines(self._path, lambda line: msgspec.json.decode(line, type=AuditLine)).records
        return lines[-count:] if count else []


def now() -> str:
    """Time of day, as in the logs."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


KEY_CHARACTERS = 12


def key_of(node: str, key: ClusterKey | None) -> str:
    """How the key begins under which a node of this name is let in; "" where there are no keys."""
    if key is None:
        return ""
    key.refresh()
    try:
        return key.ring().server_key(node)[:KEY_CHARACTERS]
    except SecurityError:  # it has retired since the node was let in
        return ""
