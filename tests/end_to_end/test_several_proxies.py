"""Two proxies of one run, each a process with an engine of its own: one is lost while hundreds of requests run.

What proves that no trajectory is lost is the run's ledger, read by an auditor with rules of its own.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.end_to_end.runs import FROZENLAKE, START, TINY, Run
from tests.support.adminshell import AdminShell
from tests.support.audit import audited_file
from tests.support.running import Command, started

START_S = 240.0
GONE_S = 5.0
"""For processes that the kernel is to kill."""

MANY = (
    *TINY,
    "train.steps=100000",
    "train.groups_per_step=8",
    "train.group_size=16",
    "environment.concurrent=256",
    "environment.workers=1",
    "environment.max_turns=8",
    "rollout.engines=1",
    "rollout.proxies=2",
    "coordinator.silence_s=8",
    "coordinator.least_silence_s=4",
)
"""256 trajectories at a time."""


class Played:
    """A run in processes of their own, by the names of their nodes."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        arguments = ["coordinator", str(FROZENLAKE), *MANY, "--runs", str(directory / "runs")]
        self.lead = stack.enter_context(started(START, *arguments, directory=directory, name="coordinator"))
        self._address = self.lead.wait_for(r"--join (tcp://\S+)", timeout_s=START_S)[1]
        self.nodes: dict[str, Command] = {}

    def start(self, role: str, name: str) -> None:
        words = [role, "--join", self._address, "--name", name]
        self.nodes[name] = self._stack.enter_context(started(START, *words, directory=self._directory, name=name))

    @property
    def run(self) -> Run:
        return Run.latest(self._directory)

    def goes_on(self, steps: int = 3) -> None:
        """So many steps are made from now on."""
        last = len(self.run.steps()) + steps
        self.lead.until(lambda: len(self.run.steps()) >= last, timeout_s=START_S, what=f"made step {last}")

    def ends(self) -> None:
        """As a person ends it; what nobody has killed ends with it and leaves nothing."""
        self.lead.send(signal.SIGTERM)
        assert self.lead.wait(timeout_s=START_S) == 130, self.lead.said()
        for command in self.nodes.values():
            assert command.wait(timeout_s=START_S) == 0, command.said()
        assert self.lead.leftovers(grace_s=GONE_S) == []


@contextmanager
def two_proxies(directory: Path) -> Iterator[tuple[Played, AdminShell]]:
    with ExitStack() as stack:
        played = Played(directory, stack)
        for role in ("weightsync", "trainer", "reward", "env"):
            played.start(role, f"{role}-node")
        for name in ("proxy-a", "proxy-b"):
            played.start("proxy", name)
        played.lead.wait_for("step 2/", timeout_s=START_S)
        yield played, stack.enter_context(AdminShell(directory))


def in_flight(shell: AdminShell) -> dict[str, int]:
    """Engine -> requests there, of those that serve."""
    engines = shell.ask("engines")["engines"]
    return {engine["name"]: engine["in_flight"] for engine in engines if engine["state"] in ("serving", "suspended")}


def check_the_books(played: Played) -> None:
    """Every step once and in order, every trajectory ended once, and none for the loss of a proxy."""
    audit = audited_file(played.run.path / "ledger.jsonl")
    assert [step["version"] for step in played.run.steps()] == list(range(1, audit.version + 1))
    assert len(audit.trained) == audit.version * 8 * 16
    assert set(audit.lost) <= {"interrupted", "unsaved"}  # what ran at the end of the run
    assert audit.resumes == 0


@pytest.mark.deep
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_one_of_two_proxies_is_lost_and_no_trajectory_is(tmp_path: Path, how: signal.Signals) -> None:
    with two_proxies(tmp_path) as (played, shell):
        busy = in_flight(shell)
        assert set(busy) == {"proxy-a.engine-0", "proxy-b.engine-0"}
        played.lead.until(lambda: min(in_flight(shell).values()) > 30, timeout_s=START_S, what="had requests at both")
        lost = played.nodes.pop("proxy-b")
        engine = played.lead.children()["proxy-b.engine-0"]
        lost.send(how)
        if how == signal.SIGKILL:
            gone = "lost the orphan of the proxy"
            played.lead.until(lambda: engine not in played.lead.children().values(), timeout_s=GONE_S, what=gone)
        played.lead.until(
            lambda: set(in_flight(shell)) == {"proxy-a.engine-0"}, timeout_s=START_S, what="missed the proxy"
        )
        played.goes_on()
        if how == signal.SIGSTOP:
            lost.send(signal.SIGCONT)
            assert lost.wait(timeout_s=START_S) == 1
            assert "proxy-b: lost the coordinator: no sign of life" in lost.stdout
        assert engine not in played.lead.children().values()

        played.start("proxy", "proxy-c")
        both = {"proxy-a.engine-0", "proxy-c.engine-0"}
        played.lead.until(lambda: set(in_flight(shell)) == both, timeout_s=START_S, what="had another proxy")
        played.lead.until(lambda: min(in_flight(shell).values()) > 0, timeout_s=START_S, what="used it")
        played.goes_on()
        played.ends()
        check_the_books(played)
