"""Elections among candidates whose links to the store are cut at random, on virtual time, from many seeds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from bus.virtual_time import run
from coordinator.leadership import LEASE, Candidate, Deposed, Term, newest_reign
from coordinator.metadata.protocol import SessionLost, StoreError
from coordinator.metadata.simulated import TICK_S, SimulatedServer, SimulatedStore

SESSION_S = 3.0
RUN = "20261130-frozenlake"


class Standby:
    """Stands again and again, as a coordinator process does that is started anew whenever it ends."""

    def __init__(self, server: SimulatedServer, name: str) -> None:
        self._server = server
        self.name = name
        self.store: SimulatedStore | None = None
        self.term: Term | None = None
        self.epochs: list[int] = []
        self._task = asyncio.create_task(self._stand())

    @property
    def leads(self) -> bool:
        return self.term is not None and self.term.leads()

    async def _stand(self) -> None:
        while True:
            self.store = self._server.open(self.name, timeout_s=1.0, session_timeout_s=SESSION_S)
            try:
                self.term = await Candidate(self.store, RUN, self.name, session_timeout_s=SESSION_S).lead()
                self.epochs.append(self.term.epoch)
                await self.term.over
            except (StoreError, Deposed):
                await asyncio.sleep(0.2)
            finally:
                self.store.stop()

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self.term is not None:
            await self.term.resign()


def simulated(scenario: Callable[[SimulatedServer], Awaitable[None]], seed: int = 0) -> None:
    async def main() -> None:
        server = SimulatedServer(seed)
        try:
            await scenario(server)
        finally:
            server.close()

    run(main(), seed=seed)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it has not happened in 100 s")


async def storm(server: SimulatedServer, seed: int, rounds: int) -> None:
    chance = random.Random(seed)
    standbys = [Standby(server, f"c{number}") for number in range(4)]
    for _ in range(rounds):
        one = chance.choice(standbys)
        if one.store is not None:
            one.store.cut() if chance.random() < 0.5 else one.store.mend()
        for _ in range(chance.randrange(1, 400)):
            await asyncio.sleep(0.01)
            leaders = [standby.name for standby in standbys if standby.leads]
            assert len(leaders) <= 1, leaders
    epochs = [epoch for standby in standbys for epoch in standby.epochs]
    assert len(epochs) > rounds // 20
    assert sorted(epochs) == sorted(set(epochs)), "an epoch was given twice"
    assert all(standby.epochs == sorted(standby.epochs) for standby in standbys)
    for standby in standbys:
        if standby.store is not None:
            standby.store.mend()
    await asyncio.sleep(20.0)
    assert sum(standby.leads for standby in standbys) == 1
    for standby in standbys:
        await standby.end()


@pytest.mark.parametrize("seed", range(5))
def test_cut_links_never_make_two_leaders_nor_one_epoch_twice(seed: int) -> None:
    simulated(lambda server: storm(server, seed, rounds=60), seed)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(100, 200))
def test_cut_links_never_make_two_leaders_over_many_seeds(seed: int) -> None:
    simulated(lambda server: storm(server, seed, rounds=300), seed)


def test_a_leader_that_is_cut_off_gives_up_before_the_next_one_leads() -> None:
    async def scenario(server: SimulatedServer) -> None:
        loop = asyncio.get_running_loop()
        first = Standby(server, "first")
        await asyncio.sleep(1.0)
        second = Standby(server, "second")
        await asyncio.sleep(1.0)
        assert (first.leads, second.leads) == (True, False)
        assert first.store is not None
        first.store.cut()
        cut = loop.time()
        await until(lambda: not first.leads)
        given_up = loop.time() - cut
        await until(lambda: second.leads)
        taken_over = loop.time() - cut
        assert given_up <= LEASE * SESSION_S  # by the arithmetic, from the last answer before the cut
        # The servers' side of it: the last sign of life is at most a third of the timeout old when the link is cut.
        assert 2 / 3 * SESSION_S <= taken_over <= SESSION_S + TICK_S + 0.1
        assert given_up < taken_over
        await first.end()
        await second.end()

    simulated(scenario)


def test_a_cut_that_is_mended_in_time_costs_no_leader_its_epoch() -> None:
    async def scenario(server: SimulatedServer) -> None:
        first, second = Standby(server, "first"), Standby(server, "second")
        await asyncio.sleep(1.0)
        leader = first if first.leads else second
        assert leader.store is not None
        assert leader.term is not None
        leader.store.cut()
        await asyncio.sleep(LEASE * SESSION_S + 0.05)
        assert not leader.leads  # uncertain, though nobody else leads
        leader.store.mend()
        await asyncio.wait_for(leader.term.certain(), 5.0)
        assert leader.epochs == [1]
        assert leader.term.lapses == 1
        await first.end()
        await second.end()

    simulated(scenario)


def test_a_leader_that_steps_down_is_succeeded_at_once_and_by_one_only() -> None:
    async def scenario(server: SimulatedServer) -> None:
        first = Standby(server, "first")
        await asyncio.sleep(1.0)
        assert first.term is not None
        assert await first.term.rivals() == 0
        second = Standby(server, "second")
        await asyncio.sleep(1.0)
        assert await first.term.rivals() == 1
        began = asyncio.get_running_loop().time()
        led = first.term
        stepping = asyncio.create_task(led.step_down())
        while not second.leads:
            assert not (led.leads() and second.leads)
            await asyncio.sleep(0.001)
        await stepping
        assert not led.leads()
        assert asyncio.get_running_loop().time() - began < SESSION_S / 3
        with pytest.raises(Deposed, match="it has stepped down"):
            await led.certain()
        assert second.epochs == [2]
        await first.end()
        await second.end()

    simulated(scenario)


def test_whoever_waits_for_certainty_learns_that_the_term_is_over() -> None:
    async def scenario(server: SimulatedServer) -> None:
        store = server.open("first", timeout_s=1.0, session_timeout_s=SESSION_S)
        term = await Candidate(store, RUN, "first", session_timeout_s=SESSION_S).lead()
        server.end_session(store)
        await asyncio.sleep(LEASE * SESSION_S)
        with pytest.raises(Deposed, match="session was lost"):
            await term.certain()
        with pytest.raises(SessionLost):
            await newest_reign(store, RUN)

    simulated(scenario)


def test_a_leader_raises_its_epoch_without_anybody_leading_in_between() -> None:
    async def scenario(server: SimulatedServer) -> None:
        first, second = Standby(server, "first"), Standby(server, "second")
        await asyncio.sleep(1.0)
        leader = first if first.leads else second
        assert leader.term is not None
        assert leader.store is not None
        assert await leader.term.raise_epoch() == 2
        assert leader.leads
        reign = await newest_reign(leader.store, RUN)
        assert reign is not None
        assert (reign.epoch, reign.name, reign.address) == (2, leader.name, "")
        await leader.term.listens_at("tcp://somewhere")
        assert await leader.term.raise_epoch() == 3
        await leader.end()
        other = second if leader is first else first
        await until(lambda: other.leads)
        assert other.epochs == [4]
        await other.end()

    simulated(scenario)


def test_a_leader_that_was_succeeded_raises_no_epoch() -> None:
    async def scenario(server: SimulatedServer) -> None:
        first = Standby(server, "first")
        await asyncio.sleep(1.0)
        second = Standby(server, "second")
        await asyncio.sleep(1.0)
        assert first.store is not None
        assert first.term is not None
        term = first.term
        first.store.cut()
        await until(lambda: second.leads)
        first.store.mend()
        with pytest.raises((Deposed, StoreError)):
            await term.raise_epoch()
        assert second.epochs == [2]
        await first.end()
        await second.end()

    simulated(scenario)
