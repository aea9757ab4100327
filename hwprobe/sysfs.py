"""Reading the kernel's small text files.

Invariant: a file that is absent or that the kernel refuses to answer for (``EINVAL`` for the speed of a virtual
interface) is ``None``; nothing here raises for what is on the machine.
"""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path) -> str | None:
    """The file's text without surrounding white space, or None."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """The file's one number, or None where it is something else (``max``, ``N/A``)."""
    text = read_text(path)
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def read_numa_node(device: Path) -> int | None:
    """NUMA node of a device, or None; the kernel's -1 means that the firmware does not say."""
    node = read_int(device / "numa_node")
    return node if node is not None and node >= 0 else None


def entries(directory: Path) -> list[Path]:
    """What is in a directory, sorted by name; nothing where it cannot be listed."""
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []
