"""Small C libraries that change one thing of one process.

Popen(command, env={**os.environ, **preload("slow_disk", tmp_path), "SLOW_DISK_MS": "300"})
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_BUILD = ["gcc", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]


def preload(name: str, place: Path) -> dict[str, str]:
    """The variables that load ``name``.c, which is built in ``place``."""
    if shutil.which("gcc") is None:
        pytest.skip("needs a C compiler: apt-get install gcc libc6-dev")
    source, library = Path(__file__).with_name(f"{name}.c"), place / f"{name}.so"
    subprocess.run([*_BUILD, "-o", str(library), str(source)], check=True, timeout=60)
    return {"LD_PRELOAD": str(library)}
