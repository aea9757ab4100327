"""Who stands by on this machine is known by the kernel's lock, also where the store shows nobody."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from coordinator.standbylock import anybody_stands, standing

STANDS = """
import sys
from pathlib import Path
from coordinator.standbylock import standing
with standing(Path(sys.argv[1])):
    print("stands", flush=True)
    sys.stdin.read()
"""


def test_somebody_stands_from_when_the_first_does_until_the_last_has_ended(tmp_path: Path) -> None:
    assert not anybody_stands(tmp_path)
    with standing(tmp_path):
        assert anybody_stands(tmp_path)
        with standing(tmp_path):
            assert anybody_stands(tmp_path)
        assert anybody_stands(tmp_path)
    assert not anybody_stands(tmp_path)


def test_a_process_that_is_killed_stands_no_longer(tmp_path: Path) -> None:
    words = [sys.executable, "-c", STANDS, str(tmp_path)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(words, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "stands\n"
        assert anybody_stands(tmp_path)
        other.kill()
    assert not anybody_stands(tmp_path)
