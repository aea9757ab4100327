"""Where a request goes: the class of hardware that suits its domain, the engine that holds its prefix, the least load.

Invariant: a request never waits for a preferred engine while another one serves: preference falls back, and the
fallback is counted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

STICKY_SLACK = 0.5
"""A trajectory stays with the engine that holds its prefix while that engine's load (share of its places) exceeds the
least loaded one's by no more than this; a prefix is cheaper to keep than to rebuild, up to a point."""


class Candidate(Protocol):
    """What routing needs to know of an engine."""

    name: str
    hardware_class: str

    @property
    def load(self) -> float:
        """Requests in flight per place in the running batch."""


class Choice:
    """A decision and whether it fell back from the declared class."""

    __slots__ = ("engine", "fell_back")

    def __init__(self, engine: str, fell_back: bool) -> None:
        self.engine = engine
        self.fell_back = fell_back


def preferred_class(affinity: Mapping[str, str], domain: str) -> str | None:
    """The hardware class that a job declares for a domain, or for the rest under "default"."""
    return affinity.get(domain, affinity.get("default"))


def choose(serving: Iterable[Candidate], *, preferred: str | None, holder: str | None) -> Choice | None:
    """Pick an engine among those that serve; None where there is none. ``holder`` has the trajectory's prefix."""
    engines = sorted(serving, key=lambda engine: (engine.load, engine.name))
    if not engines:
        return None
    suited = [engine for engine in engines if preferred is None or engine.hardware_class == preferred]
    pool = suited or engines
    least = pool[0]
    for engine in pool:
        if engine.name == holder and engine.load <= least.load + STICKY_SLACK:
            return Choice(engine.name, fell_back=not suited)
    return Choice(least.name, fell_back=not suited)


class Apportionment:
    """Divides a task's trajectories between hardware classes: each new one goes to the class that is furthest behind
    its share, so that shares hold over every stretch and not only on average."""

    def __init__(self) -> None:
        self.shares: dict[str, dict[str, float]] = {}
        self._owed: dict[str, dict[str, float]] = {}

    def order(self, shares: Mapping[str, Mapping[str, float]]) -> None:
        """These hold from now on; what a task is owed so far is forgotten where its shares change."""
        after = {task: dict(of_task) for task, of_task in shares.items()}
        same = {task for task, of_task in after.items() if self.shares.get(task) == of_task}
        self._owed = {task: owed for task, owed in self._owed.items() if task in same}
        self.shares = after

    def knows(self, task: str) -> bool:
        return task in self.shares

    def pick(self, task: str, holder: str | None, serving: Collection[str]) -> str | None:
        """The class of one that is known; None where none of those that have a share serves. ``holder``: the class
        that has the trajectory's prefix, which keeps it as long as it has a share."""
        able = {name: share for name, share in self.shares[task].items() if share > 0 and name in serving}
        if holder in able or not able:
            return holder if holder in able else None
        owed = self._owed.setdefault(task, {})
        for name, share in able.items():
            owed[name] = owed.get(name, 0.0) + share
        chosen = max(able, key=lambda name: (owed[name], name))
        owed[chosen] -= sum(able.values())
        return chosen


def surplus(held: Mapping[str, int], places: Mapping[str, int]) -> dict[str, int]:
    """By engine, how many more trajectories it holds than its share by places, rounded up; only those with any."""
    total, room = sum(held.values()), sum(places.values())
    beyond = {name: count - math.ceil(total * places[name] / room) for name, count in held.items()}
    return {name: count for name, count in beyond.items() if count > 0}
