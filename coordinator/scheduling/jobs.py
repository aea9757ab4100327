"""How many env places each of several jobs may use: quotas, priorities, and shares by weight.

    claims (of each job: what it uses, what it could use) --allot--> targets --bounds--> what each may use from now on

Invariants of ``allot``, in whole places:

- no more is given out than there is, no job gets more than it can use or than its ``most``, and nothing is left over
  that a job could use (within its ``most``);
- what a job is guaranteed (``least``) it gets, as far as it can use it, whatever the others' priorities; where there is
  not even so much, the guarantees of a higher priority are met first;
- beyond that a job gets places only if every job of a higher priority has all that it can use; jobs of one priority
  share by weight: places divided by weight differ by no more than one place does.

Invariant of ``bounds``: no trajectory is ever cut, and still no place is given twice. A job that must give up places is
bound first, and starts nothing until enough of its trajectories have ended by themselves; others get them only then.
At every moment the larger of what a job uses and of what it may use, summed over all jobs, is within the places.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import msgspec


class Quota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is agreed for a job."""

    priority: int = 0  # higher goes first
    weight: float = 1.0  # among jobs of its priority
    least: int = 0  # places that it is guaranteed
    most: int | None = None  # and never more than this


class Claim(msgspec.Struct, frozen=True):
    """One job now."""

    job: str
    quota: Quota
    used: int  # places that its trajectories have
    wanted: int  # places that it could use, those included
    bound: int | None = None  # what it may use until it hears otherwise; None: nobody has bound it yet


def allot(claims: Sequence[Claim], places: int) -> dict[str, int]:
    """How many places each job should have."""
    given = {claim.job: 0 for claim in claims}
    left = _fill(claims, {claim.job: min(claim.quota.least, _limit(claim)) for claim in claims}, given, places)
    _fill(claims, {claim.job: _limit(claim) for claim in claims}, given, left)
    return given


def lowered(claim: Claim, target: int) -> int:
    """What a job that has to give up places may use from now on; ``bounds`` counts on it only once the job has heard
    so, and its claim says it."""
    return min(target, claim.used if claim.bound is None else claim.bound)


def bounds(claims: Sequence[Claim], targets: Mapping[str, int], places: int) -> dict[str, int]:
    """Of those jobs that may use more from now on: how many places. All must be bound. They get what is free, on the
    way to their targets, the highest priority first."""
    held = {claim.job: max(claim.used, claim.bound or 0) for claim in claims}
    free = places - sum(held.values())
    raised = {}
    for claim in sorted(claims, key=lambda each: (-each.quota.priority, each.job)):
        more = min(targets[claim.job] - held[claim.job], max(0, free))
        bound = held[claim.job] + more  # what it uses beyond its bound is counted already
        if more >= 0 and bound > (claim.bound or 0):
            raised[claim.job] = bound
            free -= more
    return raised


def _limit(claim: Claim) -> int:
    """What a job can use."""
    return claim.wanted if claim.quota.most is None else min(claim.wanted, claim.quota.most)


def _fill(claims: Sequence[Claim], limits: Mapping[str, int], given: dict[str, int], places: int) -> int:
    """Raise what is given towards the limits, the highest priority first; returns what is left."""
    for priority in sorted({claim.quota.priority for claim in claims}, reverse=True):
        equals = [claim for claim in claims if claim.quota.priority == priority]
        heap = [((given[each.job] + 1) / each.quota.weight, each.job, each.quota.weight) for each in equals]
        heapq.heapify(heap)
        while heap and places > 0:
            _, job, weight = heapq.heappop(heap)
            if given[job] < limits[job]:
                given[job] += 1
                places -= 1
                heapq.heappush(heap, ((given[job] + 1) / weight, job, weight))
    return places
