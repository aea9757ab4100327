"""The trajectory store: bytes of scored trajectories, durable before they are acknowledged.

Invariant: ``put`` returns only after the record has left this process, so the death of any process loses nothing that
was acknowledged (a machine that loses power goes back to the last checkpoint, which is synced); where it raises, the
file is as it was before. Each record carries its length and checksums of both: a torn record at the end of a file (a
crash in the middle of a write) is cut off with a warning, anything else that does not fit is an error. The file is
rewritten once most of it is of no use any more.

A file begins with a head that says its format; one of format 0 has none and begins with its first record.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from actors.formats import RECORDS, FormatRefused
from actors.trajectory import Trajectory
from bus.codec import Frame, dumps, loads
from bus.message import DecodeError

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_MAGIC = b"RATRAJ"
_FORMAT = struct.Struct("<H")
_FILE_HEAD = _MAGIC + _FORMAT.pack(RECORDS.current)
_HEAD = struct.Struct("<III")  # length of the blob, crc32 of that length, crc32 of the blob

SLACK_BYTES = 16 << 20
"""Dead bytes that a file may hold before it is rewritten, beside as many as it has live ones."""


class StoreCorrupt(RuntimeError):
    """A record that does not fit its checksum, or a file of another format; the message names file and offset."""


class UnknownTrajectory(LookupError):
    """A ticket whose trajectory is not in the store."""


class TrajectoryStore:
    """Keeps trajectories by ticket, in memory and in one append-only file."""

    def __init__(self, path: Path, *, start_from: Path | None = None) -> None:
        """Opens the file with what it holds or, on going on from a checkpoint, with what ``start_from`` holds instead.
        Raises ``StoreCorrupt`` or ``OSError``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._held: dict[str, Trajectory] = {}
        self._bytes: dict[str, int] = {}  # of each one's record
        self._file_bytes = 0
        if start_from is not None:  # another file of that name: a trainer that was cut off may still write into the old
            fresh = path.with_suffix(".new")
            fresh.write_bytes(start_from.read_bytes())
            os.replace(fresh, path)
        if path.exists():
            with path.open("rb") as file:
                self._file_bytes = _records_begin(path, file.read(len(_FILE_HEAD)))
            for trajectory, end in read_records(path):
                self._note(trajectory, end - self._file_bytes)
                self._file_bytes = end
            os.truncate(path, self._file_bytes)  # what follows a torn record could not be read again
        self._file = path.open("ab", buffering=0)
        if not self._file_bytes:
            self._append(_FILE_HEAD)
            self._file_bytes = len(_FILE_HEAD)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, ticket: str) -> bool:
        return ticket in self._held

    def put(self, trajectory: Trajectory) -> None:
        """Keep a trajectory; a ticket that is here already is left alone (the same message sent twice). Raises
        ``OSError``, on a full disk for example."""
        if trajectory.ticket in self._held:
            return
        record = _record(trajectory)
        try:
            self._append(record)
        except OSError as error:
            self._file.truncate(self._file_bytes)  # what follows a torn record could not be read again
            raise OSError(error.errno, error.strerror, str(self._path)) from None
        self._file_bytes += len(record)
        self._note(trajectory, len(record))

    def _append(self, record: bytes) -> None:
        rest = memoryview(record)
        while rest:  # a nearly full disk may shorten a write
            rest = rest[self._file.write(rest) :]

    def _note(self, trajectory: Trajectory, size: int) -> None:
        self._held[trajectory.ticket] = trajectory
        self._bytes[trajectory.ticket] = size

    def get(self, ticket: str) -> Trajectory:
        """Raises ``UnknownTrajectory``."""
        if ticket not in self._held:
            raise UnknownTrajectory(f"trajectory {ticket} is not in the store, which holds {len(self._held)}")
        return self._held[ticket]

    def drop(self, tickets: Iterable[str]) -> None:
        """Forget trajectories; unknown ones are fine."""
        for ticket in tickets:
            if self._held.pop(ticket, None) is not None:
                del self._bytes[ticket]
        live = sum(self._bytes.values())
        if self._file_bytes > 2 * live + SLACK_BYTES:
            try:
                self.compact()
            except OSError as error:  # the file stays as long as it is
                log.warning("the trajectory store cannot be rewritten: %s", error)

    def held(self) -> list[Trajectory]:
        """What is here now, in the order of arrival."""
        return list(self._held.values())

    def compact(self) -> None:
        """Rewrite the file with what is still held, atomically. Raises ``OSError``; it is then as it was."""
        fresh = self._path.with_suffix(".new")
        try:
            size = write_records(fresh, self.held())
            file = fresh.open("ab", buffering=0)
            os.replace(fresh, self._path)
        finally:
            fresh.unlink(missing_ok=True)
        self._file.close()
        self._file, self._file_bytes = file, size

    def close(self) -> None:
        self._file.close()


def _record(trajectory: Trajectory) -> bytes:
    blob = dumps(trajectory)
    return _HEAD.pack(len(blob), zlib.crc32(_LENGTH.pack(len(blob))), zlib.crc32(blob)) + blob


def write_records(path: Path, trajectories: Iterable[Trajectory]) -> int:
    """Write a file of its own, synced; returns its size. A ``TrajectoryStore`` can start from it. Raises ``OSError``,
    and leaves no part of it to keep a full disk full."""
    try:
        with path.open("wb") as file:
            size = file.write(_FILE_HEAD) + sum(file.write(_record(trajectory)) for trajectory in trajectories)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return size


def append_record(path: Path, trajectory: Trajectory) -> None:
    """Add one to a file of records, which is made where it is missing. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write((b"" if file.tell() else _FILE_HEAD) + _record(trajectory))


def _records_begin(path: Path, head: Frame) -> int:
    """Where they do, in a file that begins so. Raises ``StoreCorrupt``."""
    if len(head) < len(_FILE_HEAD) or bytes(head[: len(_MAGIC)]) != _MAGIC:  # a torn head is like no record
        return 0
    try:
        RECORDS.check(_FORMAT.unpack_from(head, len(_MAGIC))[0], path)
    except FormatRefused as error:
        raise StoreCorrupt(str(error)) from None
    return len(_FILE_HEAD)


def read_records(path: Path) -> Iterator[tuple[Trajectory, int]]:
    """All whole records of a file, each with the offset of its end. Raises ``StoreCorrupt``."""
    data = memoryview(path.read_bytes())
    offset = _records_begin(path, data[: len(_FILE_HEAD)])
    while offset < len(data):
        where = f"{path}: the record at offset {offset}"
        start = offset + _HEAD.size
        if start > len(data):
            log.warning("%s is torn: it is dropped", where)
            return
        length, length_check, check = _HEAD.unpack_from(data, offset)
        if zlib.crc32(_LENGTH.pack(length)) != length_check:
            raise StoreCorrupt(f"{where} has a length that does not fit its checksum")
        if start + length > len(data):
            log.warning("%s is torn: it is dropped", where)
            return
        blob = data[start : start + length]
        if zlib.crc32(blob) != check:
            raise StoreCorrupt(f"{where} does not fit its checksum")
        try:
            trajectory = loads(blob, Trajectory)
        except DecodeError as error:
            raise StoreCorrupt(f"{where} is whole, but no trajectory: {error}") from None
        offset = start + length
        yield trajectory, offset
