"""What the end-to-end tests run, and how they read what a run left behind: plain JSON, no code of the run's own."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.running import ROOT, Command, Ended, ran, started

FROZENLAKE = ROOT / "examples" / "frozenlake.yaml"
FROZENLAKE_MAPS = ROOT / "examples" / "frozenlake-maps.yaml"
TRAIN = "coordinator.commands.train"
START = "coordinator.commands.start"
ROLES = ("proxy", "env", "reward", "trainer", "weightsync")

TINY = (
    "rollout.engine=torch",
    "policy.shape.hidden_size=32",
    "policy.shape.layers=1",
    "environment.max_turns=3",
    "train.groups_per_step=2",
    "train.group_size=4",
    "evaluation.episodes=2",
    "evaluation.every=0",
)
"""Steps of a few milliseconds: for tests of what happens around the learning."""


def job_with_reward_worker(directory: Path) -> str:
    """A job file for FrozenLake, scored by a function of one's own, so that there is a reward worker."""
    shutil.copy(ROOT / "tests" / "end_to_end" / "faulty.py", directory / "faulty.py")
    path = directory / "job.yaml"
    path.write_text("environment: {name: frozenlake, workers: 1}\nreward: {function: 'faulty:paid'}\n")
    return str(path)


def everywhere(directory: Path, code: str) -> dict[str, str]:
    """Environment in which every Python process runs ``code`` before anything else."""
    (directory / "first").mkdir()
    (directory / "first" / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": f"{directory / 'first'}{os.pathsep}{ROOT}"}


def training(
    directory: Path, *arguments: str, name: str = "", environment: Mapping[str, str] | None = None
) -> AbstractContextManager[Command]:
    """``train`` with these arguments; its run directories go below ``directory``."""
    words = [*arguments, "--runs", str(directory / "runs")]
    return started(TRAIN, *words, directory=directory, name=name, environment=environment)


def trained(directory: Path, *arguments: str, timeout_s: float, name: str = "") -> Ended:
    """The same, to its end."""
    return ran(
        TRAIN, *arguments, "--runs", str(directory / "runs"), directory=directory, timeout_s=timeout_s, name=name
    )


@contextmanager
def separate_processes(directory: Path, *overrides: str) -> Iterator[tuple[Command, dict[str, Command]]]:
    """The quick start as a coordinator and a process for each role, over tcp; roles start in an order in which most
    have to wait for others."""
    arguments = ["coordinator", str(FROZENLAKE), *overrides, "--runs", str(directory / "runs")]
    with ExitStack() as stack:
        lead = stack.enter_context(started(START, *arguments, directory=directory, name="coordinator"))
        address = lead.wait_for(r"--join (tcp://\S+)", timeout_s=60.0)[1]
        roles = {}
        for role in reversed(ROLES):
            words = [role, "--join", address, "--name", f"{role}-node"]
            roles[role] = stack.enter_context(started(START, *words, directory=directory, name=role))
        yield lead, roles


class Run:
    """A run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def latest(cls, directory: Path) -> Run:
        return cls((directory / "runs" / "latest").resolve())

    def steps(self) -> list[dict[str, Any]]:
        return [record for record in self._lines("metrics.jsonl") if record["record"] == "step"]

    def evaluations(self) -> list[dict[str, Any]]:
        return [record for record in self._lines("metrics.jsonl") if record["record"] == "evaluation"]

    def spans(self) -> list[dict[str, Any]]:
        return list(self._lines("timeline.jsonl"))

    def samples(self) -> list[dict[str, Any]]:
        return list(self._lines("samples/index.jsonl"))

    def events(self, node: str) -> list[dict[str, Any]]:
        """The log of one process."""
        return list(self._lines(f"logs/{node}.log"))

    def checkpoints(self) -> list[int]:
        """Versions, oldest first."""
        return sorted(int(re.split(r"[v.]", path.name)[1]) for path in (self.path / "checkpoints").glob("v*"))

    def checkpoint(self) -> dict[str, Any]:
        """What the coordinator wrote into the newest one."""
        newest = max((self.path / "checkpoints").glob("v*"), key=lambda path: path.stat().st_mtime_ns)
        state: dict[str, Any] = json.loads((newest / "run.json").read_text())
        return state

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        for line in (self.path / name).read_text().splitlines():
            yield json.loads(line)


def balance(stdout: str) -> dict[str, int]:
    """The last conservation line of a run, as numbers: what was admitted, and where it went."""
    line = re.findall(r"^trajectories: (.*)$", stdout, re.MULTILINE)[-1]
    counts = re.fullmatch(
        r"admitted (\d+) = trained (\d+) \+ lost \((.*)\) \+ evicted \((.*)\) \+ in flight (\d+) \+ buffered (\d+) "
        r"\+ taken (\d+)",
        line,
    )
    if counts is None:
        raise ValueError(f"not a conservation line: {line!r}")
    admitted, trained_, lost, evicted, in_flight, buffered, taken = counts.groups()
    return {
        "admitted": int(admitted),
        "trained": int(trained_),
        "lost": _total(lost),
        "evicted": _total(evicted),
        "in flight": int(in_flight),
        "buffered": int(buffered),
        "taken": int(taken),
    }


def _total(reasons: str) -> int:
    return 0 if reasons == "none" else sum(int(part.rpartition(" ")[2]) for part in reasons.split(", "))
