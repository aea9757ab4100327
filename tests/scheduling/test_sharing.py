"""Several runs that share the places of one cluster, each with its real coordinator, on virtual time."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from actors.core import Node
from bus.simulated import Link, SimulatedNetwork
from bus.virtual_time import run
from coordinator.admin import AdminDesk, RunState
from coordinator.commands.share import ClusterError, load, main
from coordinator.coordinator import Coordinator
from coordinator.launch import ADDRESS_FILE, CONTROL
from coordinator.losses import LossWatch
from coordinator.messages import Welcome
from coordinator.orders import Explain, Explained, Places
from coordinator.scheduling.jobs import Quota
from coordinator.scheduling.ledger import Ledger
from coordinator.scheduling.rolling import RollingScheduler
from coordinator.scheduling.succession import found_in
from coordinator.sharing import LEASE_S, Sharing
from tests.scheduling.cluster import Cluster, cluster
from tests.scheduling.support import Written, rules

PLACES = 8


async def runs(stack: AsyncExitStack, *quotas: Quota) -> tuple[list[Cluster], Sharing]:
    """So many runs with a host of eight places each, and who shares eight places among them."""
    network = SimulatedNetwork(seed=0, link=Link(latency_s=0.001))
    made: list[Cluster] = []
    sharing = Sharing(PLACES)
    broker = await stack.enter_async_context(Node("sharing", transport=network.join("sharing")))
    for number, quota in enumerate(quotas):
        each = await stack.enter_async_context(cluster(rules(alpha=0, groups=40), network=network, name=f"-{number}"))
        await each.add_host(f"env-{number}", PLACES)
        made.append(each)
        sharing.join(f"run-{number}", broker, each.ref, quota)
    return made, sharing


def playing(made: Cluster) -> int:
    """Trajectories in places of its hosts or about to be."""
    return sum(state in ("place", "engine") for host in made.hosts.values() for state in host.states.values())


async def shared(made: list[Cluster], sharing: Sharing, seconds: int) -> None:
    """Share every two seconds; never are there more trajectories than places."""
    for second in range(seconds):
        if second % 2 == 0:
            await sharing.round()
        await asyncio.sleep(1.0)
        assert sum(playing(each) for each in made) <= PLACES


def test_two_runs_have_half_of_the_places_each_and_together_never_more() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            made, sharing = await runs(stack, Quota(), Quota())
            await sharing.round()
            for each in made:
                each.begin()
            await shared(made, sharing, 60)
            assert await sharing.round() == {"run-0": 4, "run-1": 4}
            assert [playing(each) for each in made] == [4, 4]
            journals = [each.journal.events for each in made if isinstance(each.journal, Written)]
            assert [found_in(events).places for events in journals] == [4, 4]  # what another leader keeps to

    run(scenario())


def test_a_run_of_higher_priority_gets_the_places_as_the_others_trajectories_end_by_themselves() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            made, sharing = await runs(stack, Quota(least=2), Quota(priority=1))
            low, high = made
            await sharing.round()
            low.begin()
            await shared(made, sharing, 15)
            assert [playing(each) for each in made] == [8, 0]
            high.begin()
            await shared(made, sharing, 20)
            assert [playing(each) for each in made] == [2, 6]
            balance = low.scheduler.ledger.balance()
            assert (balance.lost, balance.evicted) == ({}, {})
            waiting = next(iter(low.coordinator.dispatcher.queues.ids()))
            told = await low.admin.ask(low.ref, Explain(waiting), Explained, timeout_s=5.0)
            assert "This job may use 2 places of the cluster's, and does" in told.text

    run(scenario())


def test_the_places_of_a_run_that_is_gone_are_given_to_the_others_after_its_lease() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            made, sharing = await runs(stack, Quota(), Quota())
            await sharing.round()
            for each in made:
                each.begin()
            await shared(made, sharing, 10)
            await made[1].close()
            await made[1].node.close()
            await sharing.round()
            await asyncio.sleep(5.0)
            assert playing(made[0]) == 4  # it may only be slow to answer
            await asyncio.sleep(LEASE_S)
            assert await sharing.round() == {"run-0": 8}

    run(scenario())


def test_who_shares_may_be_replaced_by_another_at_any_time() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            made, sharing = await runs(stack, Quota(), Quota(weight=3.0))
            await sharing.round()
            for each in made:
                each.begin()
            await shared(made, sharing, 30)
            broker = await stack.enter_async_context(Node("another", transport=made[0].network.join("another")))
            other = Sharing(PLACES)
            for name, member in sharing.members.items():
                other.join(name, broker, member.coordinator, member.quota)
            await shared(made, other, 30)
            assert [playing(each) for each in made] == [2, 6]

    run(scenario())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("places: 0\njobs: {}", "places: expected 1 or more, found 0"),
        ("places: 8\njobs: {a: {weight: 2}}", "jobs.a: expected either run"),
        ("places: 8\njobs: {a: {run: x, weight: 0}}", "jobs.a.weight: expected a number above 0, found 0"),
        ("places: 8\njobs: {a: {run: x, least: 5, most: 4}}", "jobs.a: expected 0 <= least <= most"),
        ("places: 8\njobs: {a: {run: x, share: 4}}", "unknown field `share`"),
        ("places: [", "not valid YAML"),
    ],
)
def test_a_cluster_that_cannot_be_shared_is_refused_by_name(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ClusterError, match=complaint):
        load(path)


def test_a_real_run_is_found_bound_and_left_with_what_it_may_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over ZeroMQ; one of the two runs is not there."""
    path = tmp_path / "cluster.yaml"
    path.write_text(f"places: 8\njobs: {{a: {{run: {tmp_path}}}, b: {{run: {tmp_path / 'none'}}}}}")

    async def scenario() -> Places:
        async with Node(CONTROL) as node:
            scheduler = RollingScheduler(rules(alpha=0, groups=4), Ledger())
            coordinator = Coordinator(
                scheduler,
                Welcome("run", b"{}", "", "", "", 0),
                failed=lambda error: None,
                joined=lambda join: None,
                spans=lambda spans: None,
                desk=AdminDesk(RunState("run", 1), scheduler),
                warn=lambda text: None,
                losses=LossWatch(10),
                silence_s=10.0,
            )
            ref = await node.spawn(lambda: coordinator, "coordinator", restarts=0)
            scheduler.open()
            coordinator.flush()
            (tmp_path / ADDRESS_FILE).write_text(f"{ref.node.control}\n")
            assert await asyncio.to_thread(main, [str(path), "--once"]) == 0
            return coordinator.dispatcher.places()

    assert asyncio.run(scenario()) == Places(used=0, wanted=8, bound=8)
    assert capsys.readouterr().out == "a may use 8\n"
