"""A run whose every process is replaced, one after the other, by newer software, while it goes on."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from actors.version import VERSION
from tests.end_to_end.runs import START, balance
from tests.end_to_end.test_failover import Cast, cast
from tests.support.audit import audited
from tests.support.running import ROOT, Command, Ended, ran, started
from tests.support.zookeeper import zookeeper_servers

ADMIN = "coordinator.commands.admin"
NEWER = f"{VERSION}.next"
EMPTY_S = 300.0
READY_S = 420.0


def software(directory: Path, file: str, old: str, new: str) -> dict[str, str]:
    """Environment of other software: ours, with one line changed."""
    for package in ("bus", "actors", "coordinator", "hwprobe"):
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    text = (directory / file).read_text()
    assert text.count(old) == 1
    (directory / file).write_text(text.replace(old, new))
    return {"PYTHONPATH": str(directory)}


@pytest.fixture(params=["embedded", "zookeeper"])
def store(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "embedded":
        yield "coordinator.store=embedded"
        return
    with zookeeper_servers(1) as (address,):
        yield f"coordinator.store=zk://{address}"


class Upgrade:
    """Somebody at the admin shell, and new processes."""

    def __init__(self, played: Cast, stack: ExitStack, environment: dict[str, str]) -> None:
        self.played = played
        self._stack = stack
        self._environment = environment
        self._asked = 0

    def orders(self, *words: str) -> Ended:
        self._asked += 1
        arguments = ["--run", str(self.played.run.path), "--yes", "--timeout", "60", *words]
        name = f"admin-{self._asked}"
        return ran(ADMIN, *arguments, directory=self.played.directory, timeout_s=180.0, name=name)

    def ordered(self, *words: str) -> str:
        ended = self.orders(*words)
        assert ended.status == 0, f"{words}: {ended}\n{self.played.said()}"
        return ended.stdout

    def address(self) -> str:
        return (self.played.run.path / "coordinator.address").read_text().strip()

    def start(self, role: str) -> Command:
        words = [role, "--join", self.address(), "--name", f"{role}-next"]
        command = self._started(*words, name=f"{role}-next")
        command.wait_for(f"{role} is ready", timeout_s=READY_S)
        return command

    def stand_by(self) -> Command:
        words = ["coordinator", "--standby-of", str(self.played.run.path)]
        command = self._started(*words, name="standby-next")
        command.wait_for("standing by", timeout_s=READY_S)
        return command

    def _started(self, *words: str, name: str) -> Command:
        directory = self.played.directory
        return self._stack.enter_context(
            started(START, *words, directory=directory, name=name, environment=self._environment)
        )

    def goes_on(self) -> None:
        done = max((record["step"] for record in self.played.run.steps()), default=0)
        self.played.until_step(done + 2)


def replace_env_host(upgrade: Upgrade) -> Command:
    """The new one first: the old one's trajectories end, and its successor plays meanwhile."""
    new = upgrade.start("env")
    deadline = time.monotonic() + EMPTY_S
    while (ended := upgrade.orders("let-go", "env-node")).status:
        assert "trajectories are still on env-node" in ended.stderr, ended
        assert time.monotonic() < deadline, ended
    return new


def replace(upgrade: Upgrade, role: str) -> Command:
    upgrade.ordered("let-go", f"{role}-node")
    assert upgrade.played.roles[role].wait(timeout_s=180.0) == 0, upgrade.played.said()
    return upgrade.start(role)


@pytest.mark.deep
def test_every_process_of_a_run_is_replaced_and_no_trajectory_is_lost_or_trained_on_twice(
    tmp_path: Path, store: str
) -> None:
    environment = software(tmp_path / "newer", "actors/version.py", f'"{VERSION}"', f'"{NEWER}"')
    other = software(tmp_path / "other", "bus/message.py", "PROTOCOL_VERSION = 1", "PROTOCOL_VERSION = 2")
    overrides = (store, "train.steps=1000000", "coordinator.start_timeout_s=600")
    with ExitStack() as stack:
        played = stack.enter_context(cast(tmp_path, *overrides))
        upgrade = Upgrade(played, stack, environment)
        played.until_step(3)
        roles = {"env": replace_env_host(upgrade)}
        for role in ("reward", "weightsync", "proxy", "trainer"):
            upgrade.goes_on()
            roles[role] = replace(upgrade, role)
        upgrade.goes_on()
        played.standby.send(signal.SIGKILL)
        played.standby.wait(timeout_s=60.0)
        leader = upgrade.stand_by()
        upgrade.ordered("step-down")
        assert played.leader.wait(timeout_s=180.0) == 76, played.leader.said()
        leader.wait_for("under epoch 2", timeout_s=180.0)
        upgrade.goes_on()
        nodes = json.loads(upgrade.ordered("--json", "nodes"))["nodes"]
        assert {node["description"]["software"] for node in nodes} == {NEWER}
        assert {role for node in nodes for role in node["roles"]} == {"coordinator", *roles}
        words = ["env", "--join", upgrade.address(), "--name", "env-other"]
        refused = ran_with(other, *words, directory=tmp_path)
        assert refused.status == 3
        assert "speaks version 1 of the bus protocol, node env-other version 2" in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1
        leader.send(signal.SIGINT)
        assert leader.wait(timeout_s=300.0) == 130, leader.said()
        for command in roles.values():
            assert command.wait(timeout_s=120.0) == 0, command.said()
        check_the_books(played, leader)


def ran_with(environment: dict[str, str], *words: str, directory: Path) -> Ended:
    with started(START, *words, directory=directory, name="other", environment=environment) as command:
        return Ended(command.wait(timeout_s=180.0), command.stdout, command.stderr, [])


def check_the_books(played: Cast, last: Command) -> None:
    """Every step is there once, every ticket was trained on once at most, and none was lost."""
    steps = [record["step"] for record in played.run.steps()]
    assert steps == list(range(1, len(steps) + 1))
    sums = balance(last.stdout)
    assert sums["lost"] == 0, last.said()
    assert sums["trained"] == len(steps) * 2 * 4
    with (played.run.path / "ledger.jsonl").open() as journal:
        audit = audited(json.loads(line) for line in journal)
    assert (len(audit.state), len(audit.trained), audit.resumes) == (sums["admitted"], sums["trained"], 0)
