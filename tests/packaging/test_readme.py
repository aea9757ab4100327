"""What the documentation shows runs, and prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_library_example_runs_and_prints_what_the_readme_says(tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().partition("## The library")[2]
    found = re.search(r"```python\n(.*?)```\s*prints `([^`]+)`", section, re.DOTALL)
    assert found is not None
    program = tmp_path / "example.py"
    program.write_text(found[1])
    command, environment = [sys.executable, str(program)], {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, check=False, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (found[2] + "\n", "")


def test_every_package_carries_its_types() -> None:
    packages = ["bus", "actors", "coordinator", "hwprobe"]
    assert [name for name in packages if not (ROOT / name / "py.typed").exists()] == []
