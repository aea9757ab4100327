"""The trajectory store: bytes of scored trajectories, durable before they are acknowledged.

Invariant: ``put`` returns only after the record is in the file, so the death of a process loses nothing that was
acknowledged. Each record carries its length and a checksum; a torn record at the end of a file (a crash in the middle
of a write) is dropped with a warning, anything else that does not fit is an error.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from actors.trajectory import Trajectory
from bus.codec import dumps, loads

log = logging.getLogger(__name__)

_HEAD = struct.Struct("<II")  # length, crc32


class StoreCorrupt(RuntimeError):
    """A record in the middle of a file that does not fit its checksum; the message names file and offset."""


class TrajectoryStore:
    """Keeps trajectories by ticket, in memory and in one append-only file."""

    def __init__(self, path: Path) -> None:
        """Opens the file, with what it holds."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._held: dict[str, Trajectory] = {}
        if path.exists():
            self._held = {trajectory.ticket: trajectory for trajectory in read_records(path)}
        self._file = path.open("ab")

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, ticket: str) -> bool:
        return ticket in self._held

    def put(self, trajectory: Trajectory) -> None:
        """Keep a trajectory; a ticket that is here already is left alone (the same message sent twice)."""
        if trajectory.ticket in self._held:
            return
        self._file.write(_record(trajectory))
        self._file.flush()
        self._held[trajectory.ticket] = trajectory

    def get(self, ticket: str) -> Trajectory:
        """Raises ``KeyError`` naming the ticket."""
        if ticket not in self._held:
            raise KeyError(f"trajectory {ticket} is not in the store, which holds {len(self._held)}")
        return self._held[ticket]

    def drop(self, tickets: Iterable[str]) -> None:
        """Forget trajectories; their bytes go at the next ``compact``."""
        for ticket in tickets:
            self._held.pop(ticket, None)

    def restrict(self, tickets: Iterable[str]) -> list[str]:
        """Keep only these; returns what was dropped."""
        wanted = set(tickets)
        foreign = [ticket for ticket in self._held if ticket not in wanted]
        self.drop(foreign)
        return foreign

    def compact(self) -> None:
        """Rewrite the file with what is still held, atomically."""
        fresh = self._path.with_suffix(".new")
        self.copy_to(fresh)
        self._file.close()
        os.replace(fresh, self._path)
        self._file = self._path.open("ab")

    def copy_to(self, path: Path) -> None:
        """Write what is held to another file, durably."""
        with path.open("wb") as file:
            for trajectory in self._held.values():
                file.write(_record(trajectory))
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        self._file.close()


def _record(trajectory: Trajectory) -> bytes:
    blob = dumps(trajectory)
    return _HEAD.pack(len(blob), zlib.crc32(blob)) + blob


def read_records(path: Path) -> Iterator[Trajectory]:
    """All whole records of a file. Raises ``StoreCorrupt``."""
    data = path.read_bytes()
    offset = 0
    while offset < len(data):
        if offset + _HEAD.size > len(data):
            log.warning("%s: a torn record at its end (offset %d) is dropped", path, offset)
            return
        length, checksum = _HEAD.unpack_from(data, offset)
        blob = data[offset + _HEAD.size : offset + _HEAD.size + length]
        if len(blob) < length:
            log.warning("%s: a torn record at its end (offset %d) is dropped", path, offset)
            return
        if zlib.crc32(blob) != checksum:
            raise StoreCorrupt(f"{path}: the record at offset {offset} does not fit its checksum")
        yield loads(blob, Trajectory)
        offset += _HEAD.size + length
