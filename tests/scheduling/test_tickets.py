"""What a person is told of one trajectory, and what can be ordered for it, on virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from actors.core import Node, Ref
from bus.message import RemoteError
from bus.virtual_time import run
from coordinator.messages import Announce, Announced, Changed
from coordinator.orders import (
    AbortTrajectory,
    DrainHost,
    Explain,
    Explained,
    FillHost,
    GetQueues,
    GetTrajectory,
    Queues,
    SetWeights,
    TrajectoryLife,
)
from coordinator.scheduling.lives import life_in
from coordinator.scheduling.mix import TaskStream
from tests.scheduling.cluster import Cluster, cluster
from tests.scheduling.support import rules


async def life_of(made: Cluster, ticket: str) -> TrajectoryLife:
    return await made.admin.ask(made.ref, GetTrajectory(ticket), TrajectoryLife, timeout_s=30.0)


async def why(made: Cluster, ticket: str) -> str:
    return (await made.admin.ask(made.ref, Explain(ticket), Explained, timeout_s=30.0)).text


async def ordered(made: Cluster, order: object) -> str:
    return (await made.admin.ask(made.ref, order, Changed, timeout_s=30.0)).message


def whats(life: TrajectoryLife) -> list[str]:
    return [moment.what for moment in life.moments]


def test_a_trajectory_is_followed_from_its_admission_into_a_version() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=1)) as made:
            made.begin()
            assert (await life_of(made, "t0")).state == "waiting"
            assert "There is no env host yet." in await why(made, "t0")
            await made.add_host("env-1", 2)
            await asyncio.sleep(3.0)
            running = await life_of(made, "t0")
            assert (running.state, running.host, running.group, running.task) == ("running", "env-1", 0, 0)
            assert running.running is not None
            assert running.running.state == "engine"
            assert whats(running) == ["admitted", "queued", "sent"]
            assert running.moments[2].ago_s == pytest.approx(3.0, abs=0.1)
            assert "waits for an engine" in running.why
            await asyncio.sleep(7.2)
            assert (await life_of(made, "t0")).state == "settling"
            await asyncio.sleep(1.0)
            assert (await life_of(made, "t0")).state == "stored"
            assert "group 0 is complete (version 0)" in await why(made, "t0")
            made.scheduler.take()
            assert (await life_of(made, "t0")).state == "training"
            made.scheduler.trained(1)
            trained = await life_of(made, "t0")
            assert whats(trained) == ["admitted", "queued", "sent", "left its place", "stored", "trained"]
            assert trained.why == "t0 does not wait: it was trained, into version 1. It ran on env host env-1."

    run(scenario())


def test_a_waiting_one_is_told_its_queue_what_is_before_it_and_who_has_the_places() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=4)) as made:
            await made.add_host("env-1", 2)  # and two more wait there
            made.begin()
            await asyncio.sleep(1.0)
            text = await why(made, "t6")
            assert text == (
                "t6 has waited 1.0 s in the elastic queue: 2 tickets of its own stream are before it. Places are "
                "taken: 4 tickets are on 1 env host with 2 places."
            )
            await ordered(made, DrainHost("env-1"))
            assert "Every env host is being drained (env-1)" in await why(made, "t6")
            assert "There is no ticket t99" in await why(made, "t99")

    run(scenario())


def test_a_stored_one_is_told_whom_its_group_waits_for() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=1)) as made:
            await made.add_host("env-1", 4, lambda ticket: (1.0 if ticket.id == "t0" else 50.0, "stored"))
            made.begin()
            await asyncio.sleep(5.0)
            assert await why(made, "t0") == (
                "t0 is stored and waits for its group 0: 1 of 2 members are, t1 still to come. A group is trained on "
                "whole."
            )

    run(scenario())


def test_what_ended_in_an_earlier_sitting_is_read_from_the_journal(tmp_path: Path) -> None:
    async def scenario() -> TrajectoryLife:
        async with cluster(rules(), journal=tmp_path / "ledger.jsonl") as made:
            return await life_of(made, "t7")

    path = tmp_path / "ledger.jsonl"
    path.write_text(
        '{"event":"admitted","tickets":["t7"]}\n{"event":"admitted","tickets":["t70"]}\n'
        '{"event":"lost","tickets":["t7"],"reason":"env_failed","detail":"the wheel came off"}\n{"event":"lost","tick'
    )
    moments = life_in(path, "t7")
    assert [(moment.what, moment.detail) for moment in moments] == [
        ("admitted", ""),
        ("lost", "env_failed: the wheel came off"),
    ]
    assert life_in(tmp_path / "none", "t7") == []

    async def real() -> TrajectoryLife:
        async with asyncio.timeout(20.0):
            return await scenario()

    life = asyncio.run(real())  # a thread reads the journal
    assert (life.state, life.group) == ("lost", None)
    assert life.why == "t7 does not wait: it was lost, env_failed: the wheel came off."


def test_an_aborted_trajectory_is_lost_under_that_reason_and_another_member_runs_in_its_place() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=4)) as made:
            host = await made.add_host("env-1", 2)
            made.begin()
            await asyncio.sleep(1.0)
            assert "stop on env host env-1" in await ordered(made, AbortTrajectory("t0"))
            assert "waited" in await ordered(made, AbortTrajectory("t6"))
            await asyncio.sleep(1.0)
            balance = made.scheduler.ledger.balance()
            assert balance.lost == {"aborted_by_order": 2}
            assert balance.in_flight == 8
            assert whats(await life_of(made, "t6")) == ["admitted", "queued", "lost"]
            with pytest.raises(RemoteError, match="t0 is not live: only one that waits or runs can be aborted"):
                await ordered(made, AbortTrajectory("t0"))
            await asyncio.sleep(100.0)
            assert "t6" not in host.started
            assert made.scheduler.ledger.balance().buffered == 8

    run(scenario())


def test_a_drained_host_is_given_nothing_new_until_it_is_filled_again() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=8)) as made:
            drained, other = await made.add_host("env-1", 2), await made.add_host("env-2", 2)
            assert "0 trajectories still there" in await ordered(made, DrainHost("env-1"))
            made.begin()
            await asyncio.sleep(25.0)
            assert drained.started == []
            assert len(other.started) == 6  # three rounds have begun
            await ordered(made, FillHost("env-1"))
            await asyncio.sleep(5.0)
            assert len(drained.started) == 2
            with pytest.raises(RemoteError, match="no env host on node 'env-9'; there are: env-1, env-2"):
                await ordered(made, DrainHost("env-9"))

    run(scenario())


def test_queues_shares_and_hosts_are_shown_and_weights_changed_live() -> None:
    async def scenario() -> Queues:
        mix = {"easy": TaskStream(weight=3.0), "hard": TaskStream(weight=1.0, first=1000, count=5)}
        async with cluster(rules(alpha=0, groups=8), mix=mix) as made:
            await made.add_host("env-1", 2)
            made.begin()
            await asyncio.sleep(1.0)
            assert await ordered(made, SetWeights({"hard": 3.0})) == "shares are now easy 50.0%, hard 50.0%"
            with pytest.raises(RemoteError, match="no stream of tasks soft; there are easy, hard"):
                await ordered(made, SetWeights({"soft": 1.0}))
            return await made.admin.ask(made.ref, GetQueues(), Queues, timeout_s=30.0)

    queues = run(scenario())
    assert [(level.name, level.waiting, level.capacity) for level in queues.levels] == [
        ("evaluation", 0, None),
        ("short", 0, None),
        ("elastic", 4, 4),  # two groups wait: as many tickets as twice the places
    ]
    assert [(stream.name, stream.share) for stream in queues.streams] == [("easy", 0.5), ("hard", 0.5)]
    assert sum(stream.groups for stream in queues.streams) == 4
    assert [(host.node, host.places, host.used, host.draining) for host in queues.hosts] == [("env-1", 2, 4, False)]


def test_a_question_is_answered_though_the_env_host_does_not() -> None:
    async def scenario() -> str:
        async with cluster(rules(alpha=0, groups=1)) as made:
            async with Node("env-1", transport=made.network.join("env-1")) as node:
                address = node.address
            await made.node.ask(made.ref, Announce("env", Ref(address, "env"), 4), Announced, timeout_s=5.0)
            made.begin()
            await asyncio.sleep(0.5)
            return await why(made, "t0")

    assert run(scenario()).startswith("t0 is on env host env-1, which does not tell of it")
