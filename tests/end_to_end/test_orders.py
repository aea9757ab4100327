"""What the admin shell orders takes effect at once, also in a run in which nothing happens by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from actors.core import Actor, Node, Ref, handler
from actors.env.messages import LearnerVersion, Noted, Start
from actors.telemetry import SpansTaken
from coordinator.admin import AdminDesk, RunState
from coordinator.coordinator import Coordinator
from coordinator.losses import LossWatch
from coordinator.messages import Announce, Announced, Changed, Join, Pause, SetAlpha, Unpause, Welcome
from coordinator.scheduling.ledger import Ledger
from coordinator.scheduling.rolling import RollingScheduler, Rules


class Host(Actor):
    """Remembers what it is told to run."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.bounds: list[tuple[int, int]] = []

    @handler
    async def start(self, message: Start) -> Noted:
        self.started += [ticket.id for ticket in message.tickets]
        return Noted()

    @handler
    async def learner_version(self, message: LearnerVersion) -> None:
        self.bounds.append((message.version, message.alpha))


def unexpected(what: BaseException | Join | SpansTaken | str) -> None:
    raise AssertionError(what)


async def run_with(host: Host, node: Node) -> tuple[Ref, RollingScheduler]:
    """A coordinator with one env host, two groups of two at alpha 0, before anything is admitted."""
    rules = Rules(groups_per_step=2, group_size=2, alpha=0, redundant_groups=0, temperature=1.0, seed=0)
    scheduler = RollingScheduler(rules, Ledger())
    coordinator = Coordinator(
        scheduler,
        Welcome("run", b"{}", "", "", "", 0),
        failed=unexpected,
        joined=unexpected,
        spans=unexpected,
        desk=AdminDesk(RunState("run", 10), scheduler),
        warn=unexpected,
        losses=LossWatch(10),
        silence_s=10.0,
    )
    ref = await node.spawn(lambda: coordinator, "coordinator", restarts=0)
    env = await node.spawn(lambda: host, "env")
    await node.ask(ref, Announce("env", env), Announced, timeout_s=5.0)
    return ref, scheduler


async def until(condition: Callable[[], object], pause_s: float = 0.0) -> None:
    """Let others have their turns."""
    for _ in range(100):
        if condition():
            return
        await asyncio.sleep(pause_s)


def test_resume_starts_what_a_pause_kept_back_though_nothing_else_happens() -> None:
    async def scenario() -> list[str]:
        host = Host()
        async with Node("control") as node:
            coordinator, _ = await run_with(host, node)
            await node.ask(coordinator, Pause(), Changed, timeout_s=5.0)
            assert host.started == []
            await node.ask(coordinator, Unpause(), Changed, timeout_s=5.0)
            await until(lambda: host.started)
        return host.started

    assert asyncio.run(scenario()) == ["t0", "t1", "t2", "t3"]


def test_a_raised_alpha_admits_more_at_once_and_env_hosts_hear_of_it() -> None:
    async def scenario() -> Host:
        host = Host()
        async with Node("control") as node:
            coordinator, scheduler = await run_with(host, node)
            scheduler.open()
            await node.ask(coordinator, SetAlpha(1), Changed, timeout_s=5.0)
            await until(lambda: len(host.started) == 8)
        return host

    host = asyncio.run(scenario())
    assert len(host.started) == 8  # (1 + alpha) * 2 groups of 2
    assert host.bounds == [(0, 1)]


def test_tickets_whose_start_never_arrives_are_lost_by_name_and_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.coordinator.ORDER_TIMEOUT_S", 0.2)

    async def scenario() -> tuple[Host, RollingScheduler]:
        host = Host()
        async with Node("control") as node:
            coordinator, scheduler = await run_with(host, node)
            async with Node("elsewhere") as other:
                deaf = Ref(other.address, "nobody")
            await node.ask(coordinator, Announce("env", deaf), Announced, timeout_s=5.0)
            scheduler.open()
            await node.ask(coordinator, SetAlpha(0), Changed, timeout_s=5.0)
            await until(lambda: len(host.started) > 2, pause_s=0.1)  # its share of the four, and one of the other's
        return host, scheduler

    host, scheduler = asyncio.run(scenario())
    assert {"t0", "t2"} < set(host.started)
    assert scheduler.ledger.lost.keys() == {"env_host_lost"}
    assert scheduler.ledger.balance().holds
