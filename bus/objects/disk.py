"""Where objects go that memory has no room for: one file each, in a directory that lives as long as its node.

Invariants:

- what is read back is what was written, or an error: its length and CRC-32 are checked;
- a write that fails leaves nothing behind;
- the directory of a node that was killed is removed by the next node that begins, or spills, beside it: whoever lives
  holds a lock on its own one, which ends with its process in whatever way.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

PREFIX = "node-"
LOCK = "lock"

PIECE_BYTES = 4 << 20
"""Written, read and summed at a time."""

BEGIN_S = 10.0
"""How long a node waits for others that just make, or remove, their directories; and how often it looks."""

LOOK_EVERY_S = 0.02


class Disk(Protocol):
    """Real files here, a simulated disk in ``bus.objects.simulated``."""

    async def write(self, name: str, content: memoryview) -> int:
        """Returns a checksum for ``read``. Raises ``OSError``, and then holds nothing under this name."""

    async def read(self, name: str, into: memoryview, checksum: int) -> None:
        """Fill what is to be filled. Raises ``OSError``, also for what is not what was written."""

    async def tidy(self) -> None:
        """Remove what others have left that are no more. Raises ``OSError``."""

    def remove(self, name: str) -> None:
        """Also what was never written."""

    def close(self) -> None:
        """Remove everything. Idempotent."""


class FileDisk:
    """See the module docstring. Reads and writes in threads."""

    def __init__(self, directory: Path | None = None) -> None:
        """``directory``: for all nodes of this machine; by default one in the system's place for temporary files."""
        self._parent = directory or Path(tempfile.gettempdir()) / f"rollart-objects-{os.getuid()}"
        self._own: Path | None = None
        self._lock: int | None = None

    async def write(self, name: str, content: memoryview) -> int:
        return await asyncio.to_thread(self._write, name, content)

    async def read(self, name: str, into: memoryview, checksum: int) -> None:
        await asyncio.to_thread(self._read, name, into, checksum)

    def _write(self, name: str, content: memoryview) -> int:
        path = (self._own or self._open()) / name
        checksum = 0
        try:
            with path.open("wb", buffering=0) as file:
                for piece in _pieces(content):
                    checksum = zlib.crc32(piece, checksum)
                    written = 0
                    while written < len(piece):
                        written += file.write(piece[written:])
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return checksum

    def _read(self, name: str, into: memoryview, checksum: int) -> None:
        path = (self._own or self._open()) / name
        found = 0
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != len(into):
                raise OSError(errno.EIO, f"a file of another size than the {len(into)} bytes written", str(path))
            for piece in _pieces(into):
                read = 0
                while read < len(piece):
                    count = file.readinto(piece[read:])
                    if not count:
                        raise OSError(errno.EIO, "the file has shrunk", str(path))
                    read += count
                found = zlib.crc32(piece, found)
        if found != checksum:
            raise OSError(errno.EIO, f"a file with checksum {found:08x}, written with {checksum:08x}", str(path))

    def _open(self) -> Path:
        """Make this node's own directory, and remove what dead nodes have left beside it."""
        self._parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._parent.stat().st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "the directory for spilled objects is another user's", str(self._parent))
        with (self._parent / LOCK).open("wb") as beginning:
            _lock_in_time(beginning.fileno(), self._parent)  # nobody has a directory and not yet a lock on it
            if self._own is None:  # another thread of this node may have waited for the lock as well
                _remove_dead(self._parent)
                own = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._parent))
                self._lock = os.open(own / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                self._own = own
            return self._own

    async def tidy(self) -> None:
        if next(self._parent.glob(f"{PREFIX}*"), None) is not None:
            await asyncio.to_thread(self._tidy)

    def _tidy(self) -> None:
        with (self._parent / LOCK).open("wb") as beginning, contextlib.suppress(BlockingIOError):
            fcntl.flock(beginning.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)  # else somebody does so just now
            _remove_dead(self._parent)

    def remove(self, name: str) -> None:
        if self._own is not None:
            (self._own / name).unlink(missing_ok=True)

    def close(self) -> None:
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock_in_time(descriptor: int, directory: Path) -> None:
    """Raises ``OSError`` where somebody else keeps it: a process that was stopped, as a rule."""
    until = time.monotonic() + BEGIN_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                why = f"another process has kept the directory for spilled objects locked for {BEGIN_S:g} s"
                raise TimeoutError(errno.ETIMEDOUT, why, str(directory)) from None
            time.sleep(LOOK_EVERY_S)
        else:
            return


def _pieces(content: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(content), PIECE_BYTES):
        yield content[start : start + PIECE_BYTES]


def _remove_dead(parent: Path) -> None:
    """What nodes that were killed have left; with the lock on their parent."""
    for directory in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, a living node's, or removed by its own node just now
            lock = os.open(directory / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)
