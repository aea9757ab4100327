"""Whether anybody on this machine stands by to lead a run, though the embedded store shows nobody but its leader.

Invariant: the answer is the kernel's: a lock on a file of the run's directory, shared by all who stand by, which ends
with them however they end.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE = "standby.lock"


@contextmanager
def standing(directory: Path) -> Iterator[None]:
    """Stands by while the block runs. Raises ``OSError``."""
    descriptor = os.open(directory / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def anybody_stands(directory: Path) -> bool:
    """Raises ``OSError``."""
    descriptor = os.open(directory / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
