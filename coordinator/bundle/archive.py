"""The bundle itself: one .tar.gz with an index, written as it is collected.

Invariant: a bundle is whole or not there: it gets its name once it is closed. The index lists every file with its size
and what is not in it, and what was left out on purpose.
"""

from __future__ import annotations

import io
import tarfile
import time
from pathlib import Path
from types import TracebackType

from coordinator.bundle.files import Collected

LEFT_OUT = """\
Left out on purpose: weights, trajectories, samples, recorded batches, key files, values of environment variables that
are not known to be harmless, and whatever looks like a key, a token or a password ("<left-out>" stands there).
"""


class Archive:
    """A context manager; ``add`` until it ends."""

    def __init__(self, path: Path, about: str) -> None:
        """Raises ``OSError``."""
        self.path = path
        self._about = about
        self._root = path.name.removesuffix(".tar.gz")
        self._partial = path.with_name(f".{path.name}.partial")
        self._lines: list[str] = []
        self._tar = tarfile.open(self._partial, "w:gz")  # noqa: SIM115  (closed in __exit__)

    def add(self, file: Collected) -> None:
        """Raises ``OSError``."""
        note = f"  ({file.note})" if file.note else ""
        self._lines.append(f"{len(file.data):>10}  {file.name}{note}")
        self._put(file.name, file.data)

    def _put(self, name: str, data: bytes) -> None:
        facts = tarfile.TarInfo(f"{self._root}/{name}")
        facts.size, facts.mtime, facts.mode = len(data), int(time.time()), 0o600
        self._tar.addfile(facts, io.BytesIO(data))

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                made = time.strftime("%Y-%m-%d %H:%M:%S %Z")
                files = "\n".join(self._lines)
                self._put("INDEX.txt", f"{self._about}\nmade {made}\n\n{files}\n\n{LEFT_OUT}".encode())
            self._tar.close()
            if error is None:
                self._partial.chmod(0o600)
                self._partial.replace(self.path)
        finally:
            self._partial.unlink(missing_ok=True)
