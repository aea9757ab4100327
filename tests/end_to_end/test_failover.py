"""Several coordinator processes, one leads: real processes for every role, a leader that is killed or stopped, and a
standby that leads the same run on while engines, trainer and environments live on."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.core import Node, Ref
from actors.env.messages import GetTickets, Noted, Start, Stop, Ticket
from actors.proxy.messages import DescribeProxy
from actors.trainer.messages import Discard, GetWeights, SaveCheckpoint, Train
from actors.weightsync.manifest import Manifest
from actors.weightsync.messages import Publish
from bus.message import BusError, NodeAddress
from coordinator.facts import Facts
from coordinator.messages import Follow, RunOver
from coordinator.metadata import open_store
from tests.end_to_end.runs import FROZENLAKE, ROLES, START, TINY, Run, balance
from tests.support.audit import audited
from tests.support.running import Command, started
from tests.support.zookeeper import zookeeper_servers

JOB = (*TINY, "train.steps=40", "checkpoint.every=1000", "environment.max_turns=8")


NOWHERE = Ref(NodeAddress("nobody", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1", 1), "nobody")


class Cast:
    """The processes of one run."""

    def stand_by(self, stack: ExitStack, name: str) -> Command:
        words = ["coordinator", "--standby-of", str(self.run.path)]
        return stack.enter_context(started(START, *words, directory=self.directory, name=name))

    def __init__(self, leader: Command, standby: Command, roles: dict[str, Command], directory: Path) -> None:
        self.leader = leader
        self.standby = standby
        self.roles = roles
        self.directory = directory
        self.run = Run.latest(directory)

    def until_step(self, step: int, timeout_s: float = 420.0) -> None:
        deadline = time.monotonic() + timeout_s
        while max((record["step"] for record in self.run.steps()), default=0) < step:
            assert time.monotonic() < deadline, f"step {step} was not reached\n{self.said()}"
            time.sleep(0.02)

    def pids(self) -> dict[str, dict[str, int]]:
        return {role: command.children() for role, command in self.roles.items()}

    def said(self) -> str:
        return "\n".join(command.said() for command in (self.leader, self.standby, *self.roles.values()))

    def count(self, event: str) -> int:
        return (self.run.path / "ledger.jsonl").read_text().count(f'"event":"{event}"')

    def journal(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run.path / "ledger.jsonl").read_text().splitlines()]


@contextmanager
def cast(directory: Path, *overrides: str) -> Iterator[Cast]:
    with ExitStack() as stack:
        words = ["coordinator", str(FROZENLAKE), *JOB, *overrides, "--runs", str(directory / "runs")]
        leader = stack.enter_context(started(START, *words, directory=directory, name="leader"))
        address = leader.wait_for(r"--join (tcp://\S+)", timeout_s=300.0)[1]
        run = str((directory / "runs" / "latest").resolve())
        words = ["coordinator", "--standby-of", run]
        standby = stack.enter_context(started(START, *words, directory=directory, name="standby"))
        roles = {}
        for role in reversed(ROLES):
            words = [role, "--join", address, "--name", f"{role}-node"]
            roles[role] = stack.enter_context(started(START, *words, directory=directory, name=role))
        standby.wait_for("standing by", timeout_s=300.0)
        yield Cast(leader, standby, roles, directory)


@pytest.fixture
def zookeeper() -> Iterator[str]:
    with zookeeper_servers(1) as (address,):
        yield f"zk://{address}"


@pytest.fixture(params=["embedded", "zookeeper"])
def store(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "embedded":
        yield "coordinator.store=embedded"
        return
    with zookeeper_servers(1) as (address,):
        yield f"coordinator.store=zk://{address}"


def check_the_run_was_led_on(played: Cast, before: dict[str, dict[str, int]], steps: int) -> None:
    assert played.standby.wait(timeout_s=420.0) == 0, played.said()
    check_the_books(played, played.standby, steps)
    for role, command in played.roles.items():
        assert command.wait(timeout_s=30.0) == 0, command.said()
        assert f"{role} is ready" in command.stdout
    assert before["proxy"]
    assert before["trainer"]


def check_the_books(played: Cast, last: Command, steps: int) -> None:
    """Every step is there once, every ticket ended once, and none was lost."""
    assert [record["step"] for record in played.run.steps()] == list(range(1, steps + 1))
    sums = balance(last.stdout)
    lines = played.journal()
    admitted = [ticket for line in lines if line["event"] == "admitted" for ticket in line["tickets"]]
    trained = [ticket for line in lines if line["event"] == "trained" for ticket in line["tickets"]]
    assert len(admitted) == len(set(admitted)) == sums["admitted"]
    assert len(trained) == len(set(trained)) == sums["trained"] == steps * 2 * 4
    ends = sums["trained"] + sums["lost"] + sums["evicted"] + sums["in flight"] + sums["buffered"] + sums["taken"]
    assert ends == sums["admitted"]
    assert sums["lost"] == 0, played.said()
    with (played.run.path / "ledger.jsonl").open() as journal:
        audited(json.loads(line) for line in journal)


def test_a_standby_leads_the_run_on_when_the_leader_is_killed(tmp_path: Path, store: str) -> None:
    with cast(tmp_path, store) as played:
        played.until_step(5)
        before = played.pids()
        played.leader.send(signal.SIGKILL)
        killed = time.monotonic()
        done, admitted = max(record["step"] for record in played.run.steps()), played.count("admitted")
        played.standby.until(lambda: played.count("admitted") > admitted, timeout_s=120.0, what="admitted a trajectory")
        print(f"a trajectory admitted {time.monotonic() - killed:.2f} s after the kill")
        played.until_step(done + 1)
        print(f"a step done {time.monotonic() - killed:.2f} s after the kill")
        assert played.pids() == before  # engines, ranks and workers are those of before
        check_the_run_was_led_on(played, before, steps=40)


ORDERS: dict[str, tuple[str, tuple[object, ...]]] = {
    "env": ("env", (Start([Ticket("t999999", 0, 0, "train", 1.0, 0)]), Stop(["t0"], "stale"), GetTickets())),
    "trainer": ("trainer", (Train(0, [["t0"]]), Discard(["t0"]), SaveCheckpoint("/nowhere"), GetWeights())),
    "weightsync": (
        "weightsync",
        (Publish(Manifest(0, "float32", {}, np.zeros(1, np.int32), np.zeros(0, np.float32)), NOWHERE),),
    ),
    "proxy": ("proxy", (DescribeProxy(),)),
    "reward": ("member", (Follow(NOWHERE),)),
}
"""Role -> the actor there, and orders that a coordinator gives it and waits for."""


async def refusals(spec: str, run: str) -> dict[str, list[str]]:
    """What each role's node says to the first leader's orders, given once more under that one's epoch."""
    store = await open_store(spec, directory=Path("/nowhere"), timeout_s=10.0)
    try:
        nodes = {address.name: address for address in await Facts(store, run).addresses()}
    finally:
        await store.close()
    said: dict[str, list[str]] = {}
    async with Node("control", epoch=1) as old:
        for role, (actor, orders) in ORDERS.items():
            for order in orders:
                try:
                    await old.ask(Ref(nodes[f"{role}-node"], actor), order, Noted, timeout_s=20.0)
                except BusError as error:
                    said.setdefault(role, []).append(f"{type(error).__name__}: {error}")
            old.tell(Ref(nodes[f"{role}-node"], "member"), RunOver("the old leader says so"))
        async with Node("observer") as observer:
            for role in ORDERS:
                counters = (await observer.description_of(nodes[f"{role}-node"], timeout_s=20.0)).counters
                said[role].append(f"{counters['stale_epoch']} refused")
    return said


def test_a_leader_that_was_stopped_is_succeeded_and_obeyed_by_nobody_when_it_goes_on(
    tmp_path: Path, zookeeper: str
) -> None:
    with cast(tmp_path, f"coordinator.store={zookeeper}") as played:
        played.until_step(5)
        before = played.pids()
        played.leader.send(signal.SIGSTOP)
        played.standby.wait_for(r"under epoch 2", timeout_s=180.0)
        played.until_step(max(record["step"] for record in played.run.steps()) + 1)
        played.leader.send(signal.SIGCONT)
        assert played.leader.wait(timeout_s=180.0) == 75, played.leader.said()
        assert "leads no longer" in played.leader.stderr
        said = asyncio.run(refusals(zookeeper, played.run.path.name))
        for role, (_, orders) in ORDERS.items():
            *answers, count = said[role]
            assert len(answers) == len(orders)
            assert all("Superseded" in answer and "a later one is known, 2" in answer for answer in answers), answers
            assert int(count.split()[0]) >= len(orders) + 1, (role, count)  # and the tell
        check_the_run_was_led_on(played, before, steps=40)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(3))
def test_leaders_that_die_or_stop_one_after_the_other_lose_nothing(tmp_path: Path, zookeeper: str, seed: int) -> None:
    chance = random.Random(seed)
    with ExitStack() as stack:
        played = stack.enter_context(cast(tmp_path, f"coordinator.store={zookeeper}", "train.steps=240"))
        coordinators = [played.leader, played.standby, played.stand_by(stack, "standby-0")]
        stopped: list[Command] = []
        took = []
        for number in range(6):
            leader = coordinators.pop(0)
            time.sleep(chance.uniform(0.0, 3.0))
            if leader.ended:  # the run was faster
                break
            how = chance.choice([signal.SIGKILL, signal.SIGSTOP])
            leader.send(how)
            began = time.monotonic()
            stopped += [leader] if how is signal.SIGSTOP else []
            coordinators.append(played.stand_by(stack, f"standby-{number + 1}"))
            coordinators[0].wait_for(rf"under epoch {number + 2}", timeout_s=180.0)
            took.append(f"{how.name} {time.monotonic() - began:.1f} s")
            if stopped and chance.random() < 0.7:
                paused = stopped.pop()
                paused.send(signal.SIGCONT)
                assert paused.wait(timeout_s=180.0) == 75, paused.said()
        print(f"the next one led after {', '.join(took)}")
        for paused in stopped:
            paused.send(signal.SIGCONT)
            assert paused.wait(timeout_s=180.0) == 75, paused.said()
        for command in coordinators:
            assert command.wait(timeout_s=300.0) == 0, command.said()
        check_the_books(played, coordinators[0], 240)
        for command in coordinators[1:]:
            assert "has ended" in command.stdout


@pytest.mark.deep
def test_a_leader_that_dies_while_the_roles_start_is_succeeded(tmp_path: Path, zookeeper: str) -> None:
    with cast(tmp_path, f"coordinator.store={zookeeper}", "train.steps=10") as played:
        for role in ("proxy", "trainer", "env", "reward", "weightsync"):
            played.leader.wait_for(rf"{role}-node joined", timeout_s=300.0)
        played.leader.send(signal.SIGKILL)
        played.standby.wait_for("under epoch 2", timeout_s=180.0)
        assert played.standby.wait(timeout_s=420.0) == 0, played.said()
        check_the_books(played, played.standby, 10)


@pytest.mark.deep
def test_an_evaluation_that_a_dead_leader_was_at_is_done_by_the_next_one(tmp_path: Path, zookeeper: str) -> None:
    overrides = ("train.steps=12", "evaluation.every=2", "evaluation.episodes=24")
    with cast(tmp_path, f"coordinator.store={zookeeper}", *overrides) as played:
        played.until_step(4)
        played.leader.send(signal.SIGKILL)
        assert played.standby.wait(timeout_s=420.0) == 0, played.said()
        check_the_books(played, played.standby, 12)
        assert [record["version"] for record in played.run.evaluations()] == [0, 2, 4, 6, 8, 10, 12]
        said = "".join(path.read_text() for path in (played.run.path / "logs").glob("env-node*.log"))
        assert "waited for an engine" not in said  # under a name that had been answered before


@pytest.mark.deep
def test_a_run_that_a_person_ends_ends_for_its_standby_too(tmp_path: Path, zookeeper: str) -> None:
    with cast(tmp_path, f"coordinator.store={zookeeper}") as played:
        played.until_step(3)
        played.leader.send(signal.SIGTERM)
        assert played.leader.wait(timeout_s=300.0) == 130, played.leader.said()
        assert played.standby.wait(timeout_s=180.0) == 0, played.standby.said()
        assert "has ended: there is nothing to lead" in played.standby.stdout
        assert played.run.checkpoints()
        for command in played.roles.values():
            assert command.wait(timeout_s=180.0) == 0, command.said()
