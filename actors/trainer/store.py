"""The trajectory store: bytes of scored trajectories, durable before they are acknowledged.

Invariant: ``put`` returns only after the record has left this process, so the death of any process loses nothing that
was acknowledged (a machine that loses power goes back to the last checkpoint, which is synced); where it raises, the
file is as it was before. Each record carries its length and checksums of both: a torn record at the end of a file (a
crash in the middle of a write) is cut off with a warning, anything else that does not fit is an error. The file is
rewritten once most of it is of no use any more.

Trajectories are in the file alone; memory holds where. Records are as ``actors.trainer.coding`` writes them. A file
begins with a head that says its format; one of format 0 has none and begins with its first record, which is a message,
as in format 1. A file of an older format is rewritten before anything is added to it.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from actors.formats import RECORDS, FormatRefused
from actors.trainer.coding import NotCoded, decode, encode
from actors.trajectory import Trajectory
from bus.codec import Frame, loads
from bus.message import DecodeError

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_MAGIC = b"RATRAJ"
_FORMAT = struct.Struct("<H")
_FILE_HEAD = _MAGIC + _FORMAT.pack(RECORDS.current)
_HEAD = struct.Struct("<III")  # length of the blob, crc32 of that length, crc32 of the blob

MESSAGES = 1
"""The last format whose records are messages, and not coded."""

SLACK_BYTES = 16 << 20
"""Dead bytes that a file may hold before it is rewritten, beside as many as it has live ones."""


class StoreCorrupt(RuntimeError):
    """A record that does not fit its checksum, or a file of another format; the message names file and offset."""


class UnknownTrajectory(LookupError):
    """A ticket whose trajectory is not in the store."""


class Place(NamedTuple):
    """Of a record in the file, its head included."""

    start: int
    end: int


class TrajectoryStore:
    """Keeps trajectories by ticket in one append-only file. ``get`` and ``copy`` may be called from any thread, the
    rest from one."""

    def __init__(self, path: Path, *, start_from: Path | None = None) -> None:
        """Opens the file with what it holds or, on going on from a checkpoint, with what ``start_from`` holds instead.
        Raises ``StoreCorrupt`` or ``OSError``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._places: dict[str, Place] = {}
        self._file_bytes = 0
        self._swap = threading.Lock()  # places and file belong together
        if start_from is not None:  # another file of that name: a trainer that was cut off may still write into the old
            fresh = path.with_suffix(".new")
            fresh.write_bytes(start_from.read_bytes())
            os.replace(fresh, path)
        if path.exists():
            _make_current(path)
            self._file_bytes = _records_begin(path, _first_bytes(path)).start
            for trajectory, end in read_records(path):
                self._note(trajectory.ticket, end)
            os.truncate(path, self._file_bytes)  # what follows a torn record could not be read again
        self._file = path.open("a+b", buffering=0)
        if not self._file_bytes:
            self._append(_FILE_HEAD)
            self._file_bytes = len(_FILE_HEAD)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, ticket: str) -> bool:
        return ticket in self._places

    def put(self, trajectory: Trajectory) -> None:
        """Keep a trajectory; a ticket that is here already is left alone (the same message sent twice). Raises
        ``OSError``, on a full disk for example."""
        if trajectory.ticket in self._places:
            return
        record = _record(encode(trajectory))
        try:
            self._append(record)
        except OSError as error:
            self._file.truncate(self._file_bytes)  # what follows a torn record could not be read again
            raise OSError(error.errno, error.strerror, str(self._path)) from None
        self._note(trajectory.ticket, self._file_bytes + len(record))

    def _append(self, record: bytes) -> None:
        rest = memoryview(record)
        while rest:  # a nearly full disk may shorten a write
            rest = rest[self._file.write(rest) :]

    def _note(self, ticket: str, end: int) -> None:
        """A record that follows those that are known."""
        self._places[ticket] = Place(self._file_bytes, end)
        self._file_bytes = end

    def get(self, ticket: str) -> Trajectory:
        """As its record has it, whoever put it here. Raises ``UnknownTrajectory``, ``StoreCorrupt`` or ``OSError``."""
        with self._swap:
            place = self._places.get(ticket)
            if place is None:
                raise UnknownTrajectory(f"trajectory {ticket} is not in the store, which holds {len(self._places)}")
            record = _read(self._file.fileno(), place)
        for trajectory, _ in _each(self._path, memoryview(record), Records(0, RECORDS.current), before=place.start):
            return trajectory
        raise StoreCorrupt(f"{self._path}: the record at offset {place.start} has been cut off")

    def drop(self, tickets: Iterable[str]) -> None:
        """Forget trajectories; unknown ones are fine."""
        for ticket in tickets:
            self._places.pop(ticket, None)
        live = sum(place.end - place.start for place in self._places.values())
        if self._file_bytes > 2 * live + SLACK_BYTES:
            try:
                self.compact()
            except OSError as error:  # the file stays as long as it is
                log.warning("the trajectory store cannot be rewritten: %s", error)

    def held(self) -> Iterator[Trajectory]:
        """What is here now, in the order of arrival. Raises like ``get``."""
        return (self.get(ticket) for ticket in list(self._places))

    def copy(self, path: Path) -> None:
        """Write what is here now into a file of its own, synced, for a ``TrajectoryStore`` to start from. Raises
        ``OSError``, and leaves no part of it to keep a full disk full."""
        with self._swap:
            places, file = list(self._places.values()), os.dup(self._file.fileno())
        try:
            _write(path, (_read(file, place) for place in places))
        finally:
            os.close(file)

    def compact(self) -> None:
        """Rewrite the file with what is still held, atomically. Raises ``OSError``; it is then as it was."""
        fresh = self._path.with_suffix(".new")
        try:
            self.copy(fresh)
            file = fresh.open("a+b", buffering=0)
            os.replace(fresh, self._path)
        finally:
            fresh.unlink(missing_ok=True)
        with self._swap:
            self._file.close()
            self._file, self._file_bytes = file, len(_FILE_HEAD)
            for ticket, place in list(self._places.items()):
                self._note(ticket, self._file_bytes + place.end - place.start)

    def close(self) -> None:
        self._file.close()


def _read(descriptor: int, place: Place) -> bytes:
    return os.pread(descriptor, place.end - place.start, place.start)


def _record(blob: bytes) -> bytes:
    return _HEAD.pack(len(blob), zlib.crc32(_LENGTH.pack(len(blob))), zlib.crc32(blob)) + blob


def write_records(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write a file of its own, synced. A ``TrajectoryStore`` can start from it. Raises ``OSError``, and leaves no part
    of it to keep a full disk full."""
    _write(path, (_record(encode(trajectory)) for trajectory in trajectories))


def _write(path: Path, records: Iterable[bytes]) -> None:
    try:
        with path.open("wb") as file:
            file.write(_FILE_HEAD)
            file.writelines(records)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise


def append_record(path: Path, trajectory: Trajectory) -> None:
    """Add one to a file of records, which is made where it is missing. Raises ``OSError`` or ``StoreCorrupt``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        _make_current(path)
    with path.open("ab") as file:
        file.write((b"" if file.tell() else _FILE_HEAD) + _record(encode(trajectory)))


def _make_current(path: Path) -> None:
    """Rewrite a file of an older format, atomically. Raises ``StoreCorrupt`` or ``OSError``; it is then as it was."""
    if not path.stat().st_size or _records_begin(path, _first_bytes(path)).format == RECORDS.current:
        return
    fresh = path.with_suffix(".new")
    try:
        write_records(fresh, (trajectory for trajectory, _ in read_records(path)))
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


class Records(NamedTuple):
    """Where they begin, and of which format they are."""

    start: int
    format: int


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(_FILE_HEAD))


def _records_begin(path: Path, head: Frame) -> Records:
    """In a file that begins so. Raises ``StoreCorrupt``."""
    if len(head) < len(_FILE_HEAD) or bytes(head[: len(_MAGIC)]) != _MAGIC:  # a torn head is like no record
        return Records(0, 0)
    try:
        return Records(len(_FILE_HEAD), RECORDS.check(_FORMAT.unpack_from(head, len(_MAGIC))[0], path))
    except FormatRefused as error:
        raise StoreCorrupt(str(error)) from None


def read_records(path: Path) -> Iterator[tuple[Trajectory, int]]:
    """All whole records of a file, each with the offset of its end. Raises ``StoreCorrupt``."""
    data = memoryview(path.read_bytes())
    return _each(path, data, _records_begin(path, data[: len(_FILE_HEAD)]))


def _each(path: Path, data: memoryview, records: Records, before: int = 0) -> Iterator[tuple[Trajectory, int]]:
    """``before``: bytes of the file before these."""
    offset = records.start
    while offset < len(data):
        where = f"{path}: the record at offset {before + offset}"
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
            trajectory = decode(blob) if records.format > MESSAGES else loads(blob, Trajectory)
        except (DecodeError, NotCoded) as error:
            raise StoreCorrupt(f"{where} is whole, but no trajectory: {error}") from None
        offset = start + length
        yield trajectory, before + offset
