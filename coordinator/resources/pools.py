"""What the cluster consists of: one pool per hardware class, over all hosts that have joined a run.

Invariant: a host counts once, however many of its nodes take part, and from when the first joins until the last is
lost. No pool is divided beforehand: who gets which devices is ``binding.bind``'s decision, when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.messages import Join, PoolFacts, Pools
from hwprobe import ResourceProfile, decode, merge


def pools_of(joins: Iterable[Join], profile: ResourceProfile) -> Pools:
    """For people: each class with its hosts and devices, and what is worth a warning."""
    affinity = merge((decode(join.affinity) for join in joins), profile)
    pools = [
        PoolFacts(
            hardware_class=pool.hardware_class,
            kind=pool.kind or "",
            devices=len(pool.devices),
            declared=pool.declared,
            hosts=sorted({name.partition("/")[0] for name in pool.devices}),
        )
        for pool in affinity.pools
    ]
    return Pools(pools, [finding.detail for finding in affinity.findings if finding.severity != "info"])
