"""Files of one JSON record a line that survive a crash at any byte.

Invariant: a line is appended with one ``write`` and ends in a newline, so that a file is its whole lines followed by
at most one torn one. A reader leaves the torn line out, the next writer cuts it off.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


class LineWriter:
    """Appends records to a file; every record is in the hands of the operating system when ``write`` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._encoder = msgspec.json.Encoder()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        cut_torn_line(self._descriptor)

    def write(self, record: msgspec.Struct) -> None:
        """Append one record."""
        self.write_all([record])

    def write_all(self, records: Iterable[msgspec.Struct]) -> None:
        """Append several records in one ``write``, all or none. Raises ``OSError`` (a full disk), ``ValueError`` when
        closed."""
        if self._descriptor < 0:
            raise ValueError(f"{self.path}: closed; nothing can be appended")
        data = memoryview(b"".join(self._encoded(record) + b"\n" for record in records))
        written = 0
        try:
            while written < len(data):  # a signal or a nearly full disk may shorten a write
                written += os.write(self._descriptor, data[written:])
        except OSError as error:
            if written:
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def _encoded(self, record: msgspec.Struct) -> bytes:
        try:
            return self._encoder.encode(record)
        except UnicodeEncodeError:  # a lone surrogate, from bytes that were not UTF-8: no reason to stop a run
            return self._encoder.encode(_without_surrogates(msgspec.to_builtins(record)))

    def sync(self) -> int:
        """Bring the file to the disk; returns its length. Raises ``OSError``, ``ValueError`` when closed."""
        if self._descriptor < 0:
            raise ValueError(f"{self.path}: closed; there is nothing to bring to the disk")
        os.fsync(self._descriptor)
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Bring the file to the disk and close it; idempotent."""
        if self._descriptor < 0:
            return
        try:
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
            self._descriptor = -1


class Lines(msgspec.Struct, Generic[T], frozen=True):
    """What a file of records held."""

    records: list[T]
    unreadable: int  # whole lines that are not such a record


def read_lines(path: Path, decode: Callable[[bytes], T]) -> Lines[T]:
    """All records of a file; a missing file has none. ``decode`` raises ``msgspec.MsgspecError`` for a bad line."""
    bad = itertools.count()
    records = list(each_line(path, decode, lambda: next(bad)))
    return Lines(records, next(bad))


def each_line(path: Path, decode: Callable[[bytes], T], unreadable: Callable[[], object]) -> Iterator[T]:
    """One record after the other, in the memory of one; ``unreadable`` is called for each line that is none. See
    ``read_lines``."""
    for line in whole_lines(path):
        try:
            record = decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            unreadable()
        else:
            yield record


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file that end in a newline, without it; none for a missing file."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if line.endswith(b"\n"):
                yield line[:-1]


def cut_torn_line(descriptor: int, block: int = 1 << 16) -> None:
    """Truncate an open file after its last newline."""
    end = os.fstat(descriptor).st_size
    position = end
    while position > 0:
        start = max(0, position - block)
        newline = os.pread(descriptor, position - start, start).rfind(b"\n")
        if newline >= 0:
            position = start + newline + 1
            break
        position = start
    if position != end:
        os.ftruncate(descriptor, position)


def _without_surrogates(tree: Any) -> Any:
    if isinstance(tree, str):
        return tree.encode("utf-8", "backslashreplace").decode()
    if isinstance(tree, dict):
        return {_without_surrogates(key): _without_surrogates(value) for key, value in tree.items()}
    return [_without_surrogates(item) for item in tree] if isinstance(tree, list | tuple) else tree


def seize(path: Path) -> None:
    """Make a file of one's own of one that another process may still have open: what that one writes from now on is in
    no file that has a name. A torn last line is left out, a missing file is let be. Raises ``OSError``."""
    lines = whole_lines(path)
    if path.exists():
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        partial.write_bytes(b"".join(line + b"\n" for line in lines))
        partial.replace(path)


def replace_file(path: Path, data: bytes) -> None:
    """Give a file new content such that a reader (and a crash) finds either the old or the new one, whole."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
