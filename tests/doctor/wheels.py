"""Real distributions, installed beside the environment for one test.

installed(tmp_path / "old", "msgspec==0.18.6")        # and then PYTHONPATH
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 300


def installed(place: Path, *distributions: str) -> Path:
    """``place``, with these and nothing that they need. Skips the test where no package index can be reached."""
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    words += ["--retries", "1", "--timeout", "15", "--only-binary", ":all:", "--target", str(place), *distributions]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode:
        complaint = (done.stderr.strip() or "pip says nothing").splitlines()[-1]
        pytest.skip(f"{', '.join(distributions)} cannot be installed here: {complaint}")
    return place
