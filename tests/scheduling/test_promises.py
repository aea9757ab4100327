"""What the scheduler promises, on virtual time, whatever happens to env hosts and messages: nobody starves, nothing
that is trained on is older than alpha, higher levels go first, every ticket ends in exactly one recorded outcome.

The coordinator is the real one; env hosts and learner pretend. Messages are late, doubled, out of order and lost; hosts
die, are cut off and come back, join, are drained and filled; trajectories are lost and aborted; weights change.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Literal

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bus.simulated import Link
from bus.virtual_time import run
from coordinator.dispatch import Terms
from coordinator.scheduling.mix import TaskStream
from coordinator.scheduling.queues import BURST, Level
from tests.scheduling.cluster import Cluster, cluster, sampled
from tests.scheduling.support import Written, rules
from tests.support.audit import audited

VERSIONS = 5
BY_THEN_S = 20_000.0
"""Virtual time in which the versions must be made. (By hand: a batch is at most 6 trajectories; with one place, 60 s
each, half of them lost and a host found dead after 20 s, a version takes some 20 minutes.)"""
TRAIN_S = 5.0

Fault = Literal["kill", "restart", "cut off", "join", "drain", "fill", "abort", "weights"]


class Plan(msgspec.Struct, frozen=True):
    """One run."""

    alpha: int
    groups: int
    redundant: int
    places: list[int]  # of each env host at the beginning
    turns: int | None  # of stream "b": below 5 they are short
    weight: float  # of stream "b"; "a" weighs 1
    lost: float
    link: Link
    faults: list[tuple[float, Fault]]
    seed: int


LINKS = st.builds(
    Link,
    latency_s=st.just(0.001),
    loss=st.sampled_from([0.0, 0.05]),
    duplication=st.sampled_from([0.0, 0.2]),
    reordering=st.sampled_from([0.0, 0.3]),
    late_s=st.just(2.0),
)
PLANS = st.builds(
    Plan,
    alpha=st.integers(0, 2),
    groups=st.integers(1, 3),
    redundant=st.integers(0, 1),
    places=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    turns=st.sampled_from([None, 3]),
    weight=st.sampled_from([0.5, 1.0, 4.0]),
    lost=st.sampled_from([0.0, 0.2, 0.5]),
    link=LINKS,
    faults=st.lists(
        st.tuples(
            st.floats(1.0, 400.0),
            st.sampled_from(["kill", "restart", "cut off", "join", "drain", "fill", "abort", "weights"]),
        ),
        max_size=8,
    ),
    seed=st.integers(0, 2**16),
)


class Observer:
    """Sees every ticket that is taken from a queue, and what waited then."""

    def __init__(self, made: Cluster) -> None:
        self._queues = made.coordinator.dispatcher.queues
        self._take = self._queues.take
        self._in_a_row = 0  # takes from higher levels while an elastic one waited
        self._gaps: dict[str, int] = {}  # stream -> elastic takes since its last one, while it waits
        self.taken = 0
        self._queues.take = self.take  # type: ignore[method-assign]

    def take(self) -> str | None:
        waiting: dict[Level, int] = {level: self._queues.count(level) for level in ("evaluation", "short", "elastic")}
        flows = self._queues.flows("elastic")
        levels = {id_: entry.level for id_ in self._queues.ids() if (entry := self._queues.entry(id_)) is not None}
        id_ = self._take()
        if id_ is None:
            return None
        self.taken += 1
        if levels[id_] == "elastic":
            higher = waiting["evaluation"] + waiting["short"]
            assert not higher or self._in_a_row >= BURST, "an elastic one went before a short one"
            self._in_a_row = 0
            self._note_gaps(flows)
        elif waiting["elastic"]:
            self._in_a_row += 1
            assert self._in_a_row <= BURST, "the elastic level starves"
        else:
            self._in_a_row += 1
        return id_

    def _note_gaps(self, before: dict[str, int]) -> None:
        """Quanta are 8 and 1 at most: a round is 9 takes, and a change of weights may cost one more."""
        after = self._queues.flows("elastic")
        for flow, count in before.items():
            self._gaps[flow] = self._gaps.get(flow, 0) + 1 if after.get(flow, 0) == count else 0
            assert self._gaps[flow] <= 18, f"stream {flow} starves"
        for flow in set(self._gaps) - set(before):
            del self._gaps[flow]


async def learn(made: Cluster) -> None:
    """Take, train and serve, ``VERSIONS`` times."""
    changed = asyncio.Event()
    scheduler = made.scheduler
    scheduler.on_change(changed.set)
    for version in range(1, VERSIONS + 1):
        while not scheduler.ready():
            changed.clear()
            await changed.wait()
        taken = scheduler.take()
        made.coordinator.flush()
        for outcome in taken.outcomes:
            assert outcome.initiating_version >= scheduler.version - scheduler.rules.alpha
        await asyncio.sleep(TRAIN_S)
        scheduler.trained(version)
        made.coordinator.learner_version(version, scheduler.rules.alpha)
        made.coordinator.flush()
        await asyncio.sleep(TRAIN_S)
        made.serve(version)


async def trouble(made: Cluster, plan: Plan, script: Callable[..., tuple[float, str]]) -> None:
    chance = random.Random(plan.seed)
    start = asyncio.get_running_loop().time()
    for number, (at, fault) in enumerate(sorted(plan.faults)):
        await asyncio.sleep(max(0.0, start + at - asyncio.get_running_loop().time()))
        names = sorted(made.hosts)
        name = chance.choice(names)
        if fault == "kill" and len(names) > 1:
            await made.kill_host(name)
        elif fault == "cut off" and len(names) > 1:
            await made.cut_off(name)
        elif fault == "restart":
            await made.restart_host(name)
        elif fault == "join":
            await made.add_host(f"late-{number}", chance.randint(1, 4), script)
        elif fault in ("drain", "fill"):
            with contextlib.suppress(ValueError):  # it is on its way in or out
                made.coordinator.ticket_desk.drain(name, draining=fault == "drain")
        elif fault == "abort":
            running = [id_ for host in made.coordinator.dispatcher.hosts.all() for id_ in host.tickets]
            if running:
                with contextlib.suppress(ValueError):  # it is being trained on
                    made.coordinator.ticket_desk.abort(chance.choice(sorted(running)))
        elif fault == "weights":
            made.coordinator.ticket_desk.set_weights({"b": chance.choice([0.25, 1.0, 8.0])})
    await asyncio.sleep(10.0)
    for host in made.coordinator.dispatcher.hosts.all():
        host.draining = False
        made.coordinator.ticket_desk.drain(host.name, draining=False)


async def one_run(plan: Plan) -> None:
    mix = {"a": TaskStream(), "b": TaskStream(weight=plan.weight, first=1000, turns=plan.turns)}
    admission = rules(plan.alpha, groups=plan.groups, redundant=plan.redundant)
    script = sampled(plan.seed, lost=plan.lost)
    async with cluster(admission, mix=mix, terms=Terms(20, 3600.0), link=plan.link, seed=plan.seed) as made:
        for number, places in enumerate(plan.places):
            await made.add_host(f"env-{number}", places, script)
        observer = Observer(made)
        troubling = asyncio.create_task(trouble(made, plan, script))
        made.begin()
        try:
            async with asyncio.timeout(BY_THEN_S):
                await learn(made)
                await troubling
        except TimeoutError:
            pytest.fail(f"starved at version {made.scheduler.version}: {made.scheduler.ledger.balance()}")
        assert made.failures == []
        assert observer.taken >= VERSIONS * plan.groups * 2
        await everything_ends(made)


async def everything_ends(made: Cluster) -> None:
    """No new groups: what runs comes to its end, and the journal knows one end of each ticket."""
    made.scheduler.close()
    for _ in range(200):
        if made.scheduler.counts()[0] == 0:
            break
        await asyncio.sleep(60.0)
    balance = made.scheduler.ledger.balance()
    assert balance.holds
    assert (balance.in_flight, balance.taken) == (0, 0)
    assert len(made.coordinator.dispatcher.queues) == 0
    assert isinstance(made.journal, Written)
    audit = audited(msgspec.to_builtins(event) for event in made.journal.events)  # one end each, or it complains
    assert len(audit.state) == balance.admitted
    assert len(audit.trained) == balance.trained
    assert len(audit.open("stored")) == balance.buffered
    assert (+audit.lost, +audit.evicted) == (balance.lost, balance.evicted)


def _settings(examples: int) -> settings:
    return settings(
        max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=True
    )


@_settings(20)
@given(PLANS)
def test_the_promises_hold_whatever_happens(plan: Plan) -> None:
    run(one_run(plan), seed=plan.seed)


@pytest.mark.deep
@_settings(400)
@given(PLANS)
def test_the_promises_hold_in_many_runs(plan: Plan) -> None:
    run(one_run(plan), seed=plan.seed)
