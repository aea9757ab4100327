"""Facts about the machine on which a bundle is made."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import msgspec

from coordinator.bundle.files import Collected
from coordinator.bundle.redaction import Redactor, shown_environment
from hwprobe import build_affinity_map, probe


def host_files(redactor: Redactor, directory: Path | None) -> Iterator[Collected]:
    """Hardware, what it is good for, packages, Python, the environment, the disk."""
    hardware = probe()
    yield Collected("host/hardware.json", _json(hardware))
    yield Collected("host/affinity.json", _json(build_affinity_map(hardware)))
    yield Collected("host/packages.txt", packages().encode())
    yield Collected("host/python.txt", system(directory).encode())
    text, taken_out = redactor.clean("".join(f"{k}={v}\n" for k, v in shown_environment(os.environ).items()))
    note = "values of variables that are not known to be harmless are left out"
    yield Collected("host/environment.txt", text.encode(), f"{note}; {taken_out} secrets beyond" if taken_out else note)


def packages() -> str:
    """Installed distributions, one a line, as pip would freeze them."""
    found = {(one.metadata["Name"] or "?", one.version) for one in distributions()}
    return "".join(f"{name}=={version}\n" for name, version in sorted(found, key=lambda pair: pair[0].lower()))


def system(directory: Path | None) -> str:
    """The interpreter, the system, and the disk below a directory."""
    lines = [
        f"python {sys.version.split()[0]} ({platform.python_implementation()}) at {sys.executable}",
        f"system {platform.platform()}",
        f"host {platform.node()}, {os.cpu_count()} processors",
        f"load {', '.join(f'{load:.1f}' for load in os.getloadavg())}",
    ]
    if directory is not None:
        disk = shutil.disk_usage(directory)
        lines.append(f"disk of {directory}: {disk.free} of {disk.total} bytes free")
    return "\n".join(lines) + "\n"


def _json(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value)) + b"\n"
