"""Trajectories that leave an engine by order: which ones, and what is remembered of it.

Invariants:

- what costs least goes first: requests that wait for a place (the youngest first, whose turn would come last), then
  whatever has the shortest prefix to be computed anew;
- a trajectory that was moved is not moved again for ``KEEP_S``, whoever orders it, and does not go back meanwhile to
  where it came from as long as another engine serves;
- the places that were emptied on purpose count as taken for ``KEEP_S``, so that new trajectories do not fill them at
  once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec

from actors.proxy.messages import Add

KEEP_S = 60.0


class Held(msgspec.Struct, frozen=True):
    """A trajectory that has its prefix at an engine."""

    trajectory: str
    prefix: int  # tokens, of its last request
    requests: Sequence[Add] = ()  # that it has there


def pick(held: Collection[Held], waiting: Collection[str], count: int) -> list[Held]:
    """At most ``count``. ``waiting``: ids of the requests that have no place in the running batch, oldest first."""
    order = {id_: -place for place, id_ in enumerate(waiting, start=1)}

    def cost(one: Held) -> tuple[int, int, str]:
        places = [order.get(add.request.request_id, 0) for add in one.requests]
        return (min(places, default=0), one.prefix, one.trajectory)

    return sorted(held, key=cost)[:count]


def waiting(in_flight: Mapping[str, Add], places: int) -> list[str]:
    """Requests that an engine has beyond its places; those that came last are the ones without."""
    return list(in_flight)[places:]


def surplus(held: Mapping[str, int], places: Mapping[str, int]) -> dict[str, int]:
    """By engine, how many more trajectories it holds than its share by places, rounded up; only those with any."""
    total, room = sum(held.values()), sum(places.values())
    beyond = {name: count - math.ceil(total * places[name] / room) for name, count in held.items()}
    return {name: count for name, count in beyond.items() if count > 0}


class Moves:
    """What was moved lately. Time is handed in."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[str, float]] = {}  # trajectory -> from where, until when that counts
        self._emptied: dict[str, list[tuple[float, int]]] = {}  # engine -> until when, how many places
        self._gave: dict[str, float] = {}  # engine -> when, last
        self._took: dict[str, float] = {}

    def note(self, trajectories: Collection[str], source: str, target: str, emptied: int, now: float) -> None:
        until = now + KEEP_S
        self._left |= dict.fromkeys(trajectories, (source, until))
        self._emptied.setdefault(source, []).append((until, emptied))
        self._gave[source] = self._took[target] = now

    def remembers(self, trajectory: str) -> bool:
        return trajectory in self._left

    def barred(self, trajectory: str, now: float) -> str | None:
        """The engine that it must not go back to yet; it must not be moved again as long."""
        source, until = self._left.get(trajectory, ("", -math.inf))
        return source if now < until else None

    def emptied(self, engine: str, now: float) -> int:
        """Places to be counted as taken."""
        places = self._emptied.get(engine)
        if places is None:
            return 0
        places[:] = [(until, count) for until, count in places if now < until]
        return sum(count for _, count in places)

    def ended(self, trajectory: str) -> None:
        self._left.pop(trajectory, None)

    def gone(self, engine: str) -> None:
        """It died: what comes in its place has given and taken nothing."""
        self._emptied.pop(engine, None)
        self._gave.pop(engine, None)
        self._took.pop(engine, None)

    def ago(self, engine: str, now: float) -> tuple[float | None, float | None]:
        """Seconds since it last gave, and took; None: never."""
        gave, took = self._gave.get(engine), self._took.get(engine)
        return None if gave is None else now - gave, None if took is None else now - took
