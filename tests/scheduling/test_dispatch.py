"""Where tickets wait and where they go, in the real coordinator on virtual time."""

from __future__ import annotations

import asyncio

import pytest

from actors.core import Actor, handler
from actors.env.messages import Ticket
from actors.proxy.messages import TrajectoryEnded
from bus.virtual_time import run
from coordinator.dispatch import Terms
from coordinator.messages import Announce, Announced, Join, Welcome
from coordinator.scheduling.mix import TaskStream
from tests.scheduling.cluster import PretendHost, cluster
from tests.scheduling.support import rules


def test_places_stay_taken_while_trajectories_that_left_them_are_scored() -> None:
    """Two places, 10 s each, half a second of scoring: 20 trajectories take ten rounds, and no round waits for it."""

    async def scenario() -> PretendHost:
        async with cluster(rules(alpha=0, groups=10)) as made:
            host = await made.add_host("env-1", 2)
            made.begin()
            await asyncio.sleep(100.5)
            assert made.scheduler.ledger.balance().buffered == 18  # and the last two are being scored
            return host

    assert len(run(scenario()).started) == 20


def test_a_group_whose_ticket_waits_too_long_is_evicted_and_replaced() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=4), terms=Terms(time_to_live_s=60.0)) as made:
            await made.add_host("env-1", 1, lambda ticket: (50.0, "stored"))
            made.begin()
            await asyncio.sleep(59.0)
            assert made.scheduler.ledger.balance().evicted == {}
            await asyncio.sleep(20.0)  # the first two groups are on the host or past it
            balance = made.scheduler.ledger.balance()
            assert balance.evicted == {"waited_too_long": 2}
            assert balance.in_flight + balance.buffered == 6
            assert balance.holds

    run(scenario())


def test_time_in_which_no_host_takes_tickets_does_not_count_as_waiting() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=2), terms=Terms(time_to_live_s=60.0)) as made:
            made.begin()
            await asyncio.sleep(1000.0)
            host = await made.add_host("env-1", 1, lambda ticket: (20.0, "stored"))
            made.coordinator.ticket_desk.drain("env-1", draining=True)
            await asyncio.sleep(1000.0)
            made.coordinator.ticket_desk.drain("env-1", draining=False)
            await asyncio.sleep(100.0)
            assert made.scheduler.ledger.balance().evicted == {}
            assert host.started == ["t0", "t1", "t2", "t3"]

    run(scenario())


def test_when_hosts_go_what_is_too_much_is_evicted_under_its_reason() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=20)) as made:
            for number in range(4):
                await made.add_host(f"env-{number}", 2, lambda ticket: (1000.0, "stored"))
            made.begin()
            await asyncio.sleep(1.0)
            balance = made.scheduler.ledger.balance()
            assert balance.in_flight == 4 * 4 + 16  # on hosts, and as many as two rounds of all places
            for number in range(3):
                made.coordinator.ticket_desk.drain(f"env-{number}", draining=True)
            await asyncio.sleep(120.0)  # the rate of starts is forgotten, too
            balance = made.scheduler.ledger.balance()
            assert balance.evicted == {"queue_full": 8}
            assert balance.in_flight == 4 * 4 + 8  # four rounds of the two places that are left
            assert balance.holds

    run(scenario())


def test_an_evaluation_goes_before_training_tickets_that_wait() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=10)) as made:
            host = await made.add_host("env-1", 2)
            made.begin()
            await asyncio.sleep(1.0)
            held_out = [Ticket(f"e{number}", -1, number, "evaluate", 0.0, number) for number in range(6)]
            outcomes = await made.coordinator.evaluate(held_out, 1000.0)
            assert [outcome.state for outcome in outcomes] == ["evaluated"] * 6
            first = host.started.index("e0")
            assert host.started[:first] == ["t0", "t1", "t2", "t3"]  # those that were there
            assert host.started[first : first + 6] == [ticket.id for ticket in held_out]

    run(scenario())


def test_an_evaluation_that_is_given_up_waits_no_longer() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=2)) as made:
            host = await made.add_host("env-1", 1, lambda ticket: (30.0, "stored"))
            held_out = [Ticket(f"e{number}", -1, number, "evaluate", 0.0, number) for number in range(6)]
            with pytest.raises(TimeoutError, match="5 of 6 episodes did not end within 40 s"):
                await made.coordinator.evaluate(held_out, 40.0)
            await asyncio.sleep(300.0)
            assert host.started == ["e0", "e1", "e2", "e3"]  # the second one played, and two had been sent ahead
            ends = [made.coordinator.dispatcher.lives.of(f"e{number}") for number in (0, 5)]
            assert [life.moments[-1][1:] for life in ends if life is not None] == [
                ("ended", "evaluated"),
                ("ended", "given up"),
            ]

    run(scenario())


def test_short_trajectories_go_before_long_ones_that_wait() -> None:
    async def scenario() -> PretendHost:
        mix = {"long": TaskStream(), "short": TaskStream(first=1000, turns=1)}
        async with cluster(rules(alpha=0, groups=4), mix=mix) as made:
            made.begin()  # nobody has room yet: all of them wait
            host = await made.add_host("env-1", 1)
            await asyncio.sleep(100.0)
            return host

    host = run(scenario())
    tasks = [host.tickets[id_].task for id_ in host.started]
    assert tasks == [1000, 1000, 1001, 1001, 0, 0, 1, 1]


def test_trajectories_of_an_env_host_that_restarts_unnoticed_run_again() -> None:
    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=1)) as made:
            await made.add_host("env-1", 2)
            made.begin()
            await asyncio.sleep(1.0)
            await made.restart_host("env-1")
            await asyncio.sleep(15.0)
            balance = made.scheduler.ledger.balance()
            assert balance.lost == {"env_host_lost": 2}
            assert balance.buffered == 2
            assert made.failures == []

    run(scenario())


class PretendProxy(Actor):
    def __init__(self) -> None:
        self.ended: list[str] = []
        self.whole = 0

    @handler
    async def trajectory_ended(self, message: TrajectoryEnded) -> None:
        self.ended.append(message.trajectory)
        self.whole += message.whole


def test_the_proxy_is_told_of_the_trajectories_that_a_lost_env_host_played() -> None:
    """Nobody else could: it would keep their prefixes' places for ever."""

    async def scenario() -> None:
        async with cluster(rules(alpha=0, groups=1)) as made:
            proxy = PretendProxy()
            ref = await made.admin.spawn(lambda: proxy, "proxy", restarts=0)
            await made.admin.ask(made.ref, Join(made.admin.address, ["proxy"], 1, b"{}"), Welcome, timeout_s=5.0)
            await made.admin.ask(made.ref, Announce("proxy", ref), Announced, timeout_s=5.0)
            await made.add_host("env-1", 2)
            made.begin()
            await asyncio.sleep(1.0)
            await made.add_host("env-2", 2)
            await made.kill_host("env-1")
            await asyncio.sleep(30.0)
            assert made.failures == []
            assert (sorted(proxy.ended), proxy.whole) == (["t0", "t1"], 0)

    run(scenario())


def test_a_node_with_other_roles_that_restarts_unnoticed_ends_the_run_by_name() -> None:
    async def scenario() -> str:
        async with cluster(rules(alpha=0, groups=1)) as made:
            await made.add_host("env-1", 2)
            address = next(iter(made.hosts.values())).node.address
            await made.node.ask(made.ref, Join(address, ["env", "reward"], 1, b"{}"), Welcome, timeout_s=5.0)
            await made.restart_host("env-1")
            (failure,) = made.failures
            return str(failure)

    assert run(scenario()) == "node env-1 (env, reward) has restarted: what its roles held is lost"
