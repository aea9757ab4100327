"""A mapping that learns while a cluster plays on virtual time, and the mix changes under it: what it decided, and when.

Invariant: the mapping sees what the proxy sees, through the proxy's own ``Costs``, and nothing of what the engines or
the tasks are like in truth. The same seed gives the same decisions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from actors.proxy.costs import Costs
from actors.proxy.messages import Assign
from bus.virtual_time import run
from coordinator.resources.mix import Candidate, Mix
from coordinator.resources.simulation import Cluster
from hwprobe.cost import DeviceCost
from hwprobe.costmodel import CostModel
from hwprobe.flow import Shares
from hwprobe.mapping import CHANGE, TaskMapping, View, difference

LOOK_EVERY_S = 1.0
ENDLESS = 10**9


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What held after one."""

    number: int
    began: int  # trajectories so far
    shares: dict[str, dict[str, float]]  # of all tasks of the mix


def try_out(
    mapping: TaskMapping,
    mixes: Sequence[tuple[Mix, int]],
    candidate: Candidate,
    costs: Mapping[str, DeviceCost],
    *,
    declared: Mapping[str, str],
    seed: int = 0,
) -> list[list[Decision]]:
    """Play one mix after the other, for so many decisions each. ``costs``: what engines take in truth."""

    async def main() -> list[list[Decision]]:
        first = mixes[0][0]
        known = Costs(CostModel.prior(first.model, costs), declared)
        cluster = Cluster(first, candidate, costs, ENDLESS, seed, mapping=known)
        pools = {
            name: (devices // costs[name].devices, first.classes[name].ceiling) for name, devices in candidate.rollout
        }
        decisions: list[list[Decision]] = []
        cluster.start()
        number = 0
        for mix, count in mixes:
            cluster.pose(mix)
            decisions.append([])
            for _ in range(count):
                await asyncio.sleep(LOOK_EVERY_S)
                number += 1
                for engine in cluster.engines:
                    known.worked(engine.hardware_class, engine.take_work())
                await _decide(mapping, known, pools, declared)
                now = known.describe(0.0).shares
                decisions[-1].append(
                    Decision(number=number, began=cluster.began, shares=_of(mix, now, declared, pools))
                )
        return decisions

    return run(main(), seed=seed, limit_s=1e9)


async def _decide(
    mapping: TaskMapping, known: Costs, pools: dict[str, tuple[int, int]], declared: Mapping[str, str]
) -> None:
    """As ``mapper.Mapper`` does, without messages."""
    described = known.describe(0.0)
    model = CostModel(described.state)
    view = View(engines=pools, declared=dict(declared), current=described.shares, in_flight=described.in_flight)
    proposal = await mapping.propose(model, view)
    if difference(proposal.shares, described.shares) > CHANGE:
        known.assign(Assign(proposal.shares, proposal.by, proposal.why), 0.0)


def _of(
    mix: Mix, shares: Shares, declared: Mapping[str, str], pools: Mapping[str, tuple[int, int]]
) -> dict[str, dict[str, float]]:
    """Where the mix's tasks go: also those that nothing was decided about."""
    engines = sum(count for count, _ in pools.values())
    even = {name: count / engines for name, (count, _) in pools.items()}
    result = {}
    for task in mix.tasks:
        class_ = declared.get(task, declared.get("default"))
        otherwise = even if class_ is None else {name: float(name == class_) for name in pools}
        result[task] = dict(shares.get(task, otherwise))
    return result
