"""``python -m hwprobe`` on the machine that runs the tests, whatever it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from hwprobe import AffinityMap, Hardware, probe
from hwprobe.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


class Document(msgspec.Struct):
    hardware: Hardware
    affinity: AffinityMap


def test_this_machine_is_probed_in_one_json_object(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    document = msgspec.json.decode(capfd.readouterr().out, type=Document)
    assert document.hardware.memory.total_bytes == psutil.virtual_memory().total
    assert 1 <= document.hardware.cpu.usable <= len(os.sched_getaffinity(0))
    assert document.affinity.cores == document.hardware.cpu.usable
    assert document.affinity.devices[-1].hardware_class == "CPU"


def test_the_affinity_mask_of_this_process_narrows_what_it_finds() -> None:
    mask = os.sched_getaffinity(0)
    first = min(mask)
    try:
        os.sched_setaffinity(0, {first})
        hardware = probe()
    finally:
        os.sched_setaffinity(0, mask)
    assert hardware.cpu.allowed == str(first)
    assert hardware.cpu.usable == 1


def test_the_table_is_plain_text_and_needs_no_terminal() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hwprobe"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "DEVICE" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_a_wrong_profile_is_one_line_and_status_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text("cpu: {cores: 0}")
    assert main(["--profile", str(path)]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "$.cpu.cores" in error
    assert main(["--profile", str(tmp_path / "absent.yaml")]) == 2


def test_the_package_needs_neither_torch_nor_other_packages_of_the_project() -> None:
    code = (
        "import sys, hwprobe.__main__; "
        "bad = {'torch', 'numpy', 'pynvml', 'bus', 'actors', 'coordinator'} & set(sys.modules); "
        "print(', '.join(sorted(bad)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
