"""The wheel holds the four packages and the commands, and works in an environment that holds nothing else."""

from __future__ import annotations

import configparser
import json
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from tests.packaging.support import ROOT, run

PACKAGES = {"bus", "actors", "coordinator", "hwprobe"}
COMMANDS = {
    "rollart-train": "coordinator.commands.train:main",
    "rollart-sft": "coordinator.commands.sft:main",
    "rollart-rollout": "coordinator.commands.rollout:main",
    "rollart-replay": "coordinator.commands.replay:main",
    "rollart-compare": "coordinator.commands.compare:main",
    "rollart-eval": "coordinator.commands.eval:main",
    "rollart-serve": "coordinator.commands.serve:main",
    "rollart-play": "coordinator.commands.play:main",
    "rollart-admin": "coordinator.commands.admin:main",
    "rollart-support-bundle": "coordinator.commands.support_bundle:main",
    "rollart-probe": "hwprobe.__main__:main",
    "rollart-keys": "coordinator.commands.keys:main",
    "rollart-fetch-model": "coordinator.commands.fetch_model:main",
    "rollart-start": "coordinator.commands.start:main",
    "rollart-start-node": "coordinator.commands.start_node:main",
    "rollart-launch": "coordinator.commands.launch:main",
    "rollart-plan": "coordinator.commands.plan:main",
    "rollart-share": "coordinator.commands.share:main",
    "rollart-doctor": "coordinator.commands.doctor:main",
    "rollart-trace": "hwprobe.tracing.__main__:main",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources, since a build leaves files beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    unwanted = shutil.ignore_patterns(".*", "runs", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=unwanted)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = run([*build, "-w", folder, source], timeout=180)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_exactly_the_four_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    sources = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    typed = {f"{package}/py.typed" for package in PACKAGES}
    assert names - metadata == sources | typed
    assert any(name.endswith("/licenses/LICENSE") for name in metadata)


def test_the_wheel_brings_the_commands(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")]
        entries = configparser.ConfigParser()
        entries.read_string(archive.read(name).decode())
    assert {section: dict(entries[section]) for section in entries.sections()} == {"console_scripts": COMMANDS}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of an environment with nothing but the wheel and its core dependencies, at the pinned versions."""
    folder = tmp_path_factory.mktemp("installed")
    pins = [line.split(" ")[0] for line in (ROOT / "requirements" / "light.txt").read_text().splitlines()]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pin for pin in pins if "==" in pin and not pin.startswith("torch==")))
    made = run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], timeout=120)
    assert made.returncode == 0, made.stderr
    scripts = folder / "venv" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(scripts / "python")]
    done = run([*pip, "install", "--quiet", "-c", constraints, wheel], timeout=300)
    assert done.returncode == 0, done.stderr
    return scripts


def test_the_installed_probe_describes_this_machine(installed: Path, tmp_path: Path) -> None:
    done = run([installed / "rollart-probe", "--json"], cwd=tmp_path, env={"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["hardware"]


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_an_installed_command_explains_itself_without_torch(installed: Path, tmp_path: Path, command: str) -> None:
    assert not list(installed.parent.glob("lib/*/site-packages/torch"))
    done = run([installed / command, "--help"], cwd=tmp_path, env={"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
