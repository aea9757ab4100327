"""Several coordinator processes, one leads: real processes for every role, a leader that is killed or stopped, and a
standby that leads the same run on while engines, trainer and environments live on."""

from __future__ import annotations

import asyncio
import json
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
from tests.support.running import Command, started
from tests.support.zookeeper import zookeeper_servers

JOB = (*TINY, "train.steps=40", "checkpoint.every=1000", "environment.max_turns=8")


NOWHERE = Ref(NodeAddress("nobody", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1", 1), "nobody")


class Cast:
    """The processes of one run."""

    def __init__(self, leader: Command, standby: Command, roles: dict[str, Command], directory: Path) -> None:
        self.leader = leader
        self.standby = standby
        self.roles = roles
        self.run = Run.latest(directory)

    def until_step(self, step: int, timeout_s: float = 180.0) -> None:
        deadline = time.monotonic() + timeout_s
        while max((record["step"] for record in self.run.steps()), default=0) < step:
            assert time.monotonic() < deadline, f"step {step} was not reached\n{self.said()}"
            time.sleep(0.02)

    def pids(self) -> dict[str, dict[str, int]]:
        return {role: command.children() for role, command in self.roles.items()}

    def said(self) -> str:
        return "\n".join(command.said() for command in (self.leader, self.standby, *self.roles.values()))

    def journal(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run.path / "ledger.jsonl").read_text().splitlines()]


@contextmanager
def cast(directory: Path, *overrides: str) -> Iterator[Cast]:
    with ExitStack() as stack:
        words = ["coordinator", str(FROZENLAKE), *JOB, *overrides, "--runs", str(directory / "runs")]
        leader = stack.enter_context(started(START, *words, directory=directory, name="leader"))
        address = leader.wait_for(r"--join (tcp://\S+)", timeout_s=120.0)[1]
        run = str((directory / "runs" / "latest").resolve())
        words = ["coordinator", "--standby-of", run]
        standby = stack.enter_context(started(START, *words, directory=directory, name="standby"))
        roles = {}
        for role in reversed(ROLES):
            words = [role, "--join", address, "--name", f"{role}-node"]
            roles[role] = stack.enter_context(started(START, *words, directory=directory, name=role))
        standby.wait_for("standing by", timeout_s=120.0)
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
    assert played.standby.wait(timeout_s=300.0) == 0, played.said()
    assert [record["step"] for record in played.run.steps()] == list(range(1, steps + 1))
    sums = balance(played.standby.stdout)
    lines = played.journal()
    admitted = [ticket for line in lines if line["event"] == "admitted" for ticket in line["tickets"]]
    trained = [ticket for line in lines if line["event"] == "trained" for ticket in line["tickets"]]
    assert len(admitted) == len(set(admitted)) == sums["admitted"]
    assert len(trained) == len(set(trained)) == sums["trained"] == steps * 2 * 4
    ends = sums["trained"] + sums["lost"] + sums["evicted"] + sums["in flight"] + sums["buffered"] + sums["taken"]
    assert ends == sums["admitted"]
    assert sums["lost"] == 0, played.said()
    for role, command in played.roles.items():
        assert command.wait(timeout_s=30.0) == 0, command.said()
        assert f"{role} is ready" in command.stdout
    assert before["proxy"]
    assert before["trainer"]


def test_a_standby_leads_the_run_on_when_the_leader_is_killed(tmp_path: Path, store: str) -> None:
    with cast(tmp_path, store) as played:
        played.until_step(5)
        before = played.pids()
        played.leader.send(signal.SIGKILL)
        killed = time.monotonic()
        done = max(record["step"] for record in played.run.steps())
        played.until_step(done + 1)
        print(f"led on after {time.monotonic() - killed:.2f} s")
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
        played.standby.wait_for(r"under epoch 2", timeout_s=60.0)
        played.until_step(max(record["step"] for record in played.run.steps()) + 1)
        played.leader.send(signal.SIGCONT)
        assert played.leader.wait(timeout_s=60.0) == 75, played.leader.said()
        assert "leads no longer" in played.leader.stderr
        said = asyncio.run(refusals(zookeeper, played.run.path.name))
        for role, (_, orders) in ORDERS.items():
            *answers, count = said[role]
            assert len(answers) == len(orders)
            assert all("Superseded" in answer and "a later one is known, 2" in answer for answer in answers), answers
            assert int(count.split()[0]) >= len(orders) + 1, (role, count)  # and the tell
        check_the_run_was_led_on(played, before, steps=40)
