"""Where a request goes: the class of hardware that suits its domain, the engine that holds its prefix, the least load.

Invariant: a request never waits for a preferred engine while another one serves: preference falls back, and the
fallback is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
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


def surplus(held: Mapping[str, int], places: Mapping[str, int]) -> dict[str, int]:
    """By engine, how many more trajectories it holds than its share by places, rounded up; only those with any."""
    total, room = sum(held.values()), sum(places.values())
    beyond = {name: count - math.ceil(total * places[name] / room) for name, count in held.items()}
    return {name: count for name, count in beyond.items() if count > 0}
