"""Disks: room for what a run writes, and whether what is written gets there.

Invariant: what is written to try a disk has no name and is gone at once; a directory that is not there yet is judged by
where it would be made.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from hwprobe.doctor.findings import Examined

ROOM, SCRATCH = 1 << 30, 128 << 20
LITTLE = 64 << 20
FILES = 1_000
TRIES, PIECE = 3, 1 << 20
SLOW_S = 1.0
MIB = 1 << 20


def look(places: Mapping[Path, int]) -> Examined:
    """``places``: directory -> bytes that should be free there."""
    examined = Examined()
    rooms: dict[Path, int] = {}
    for directory, room in places.items():
        path = existing(directory)
        rooms[path] = max(room, rooms.get(path, 0))
    for path, room in rooms.items():
        facts = os.statvfs(path)
        free, size = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
        if free < room:
            _short(path, free, size, room, examined)
        elif facts.f_files and facts.f_favail < FILES:
            examined.error(
                str(path),
                f"expected room for {FILES} more files, found {facts.f_favail} of {facts.f_files} inodes free",
                "many small files have used up the file system's table, though there is room",
                f"find where they are: du --inodes -x -d 2 {path} | sort -n",
            )
        else:
            took = _written(path, examined)
            timed = "" if took is None else f", 1 MiB is on the disk in {1000 * took:.0f} ms"
            examined.note(f"{path}: {free / (1 << 30):.1f} GiB free{timed}")
    return examined


def existing(directory: Path) -> Path:
    path = directory.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _short(path: Path, free: int, size: int, room: int, examined: Examined) -> None:
    say = examined.error if free < LITTLE else examined.warning
    say(
        str(path),
        f"expected {room // MIB} MiB free, found {free // MIB} of {size // MIB} MiB",
        "the disk is full, or nearly: a run whose checkpoint, ledger or store cannot be written ends",
        f"see what takes the room (du -x -d 1 {path} | sort -n), keep fewer checkpoints (checkpoint.keep), or put runs "
        "elsewhere (--runs)",
    )


def _written(path: Path, examined: Examined) -> float | None:
    """How long it takes, at best, until a piece is on the disk; None where it cannot be written."""
    best = float("inf")
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            for _ in range(TRIES):
                started = time.monotonic()
                file.write(bytes(PIECE))
                file.flush()
                os.fsync(file.fileno())
                best = min(best, time.monotonic() - started)
    except OSError as error:
        _refused(path, error, examined)
        return None
    if best > SLOW_S:
        examined.warning(
            str(path),
            f"it took {best:.1f} s at best until 1 MiB was on the disk",
            "the disk is overloaded, failing, or far away: the ledger and every checkpoint wait for it",
            "look for errors in dmesg and at iostat -x; put runs on a local disk (--runs)",
        )
    return best


def _refused(path: Path, error: OSError, examined: Examined) -> None:
    quota = error.errno in (errno.EDQUOT, errno.ENOSPC)
    examined.error(
        str(path),
        f"1 MiB cannot be written there: {error.strerror}",
        "a quota is used up" if quota else "it is mounted read-only, or belongs to somebody else",
        "raise the quota, or remove what is not needed" if quota else f"see mount and ls -ld {path}",
    )
