"""What waits to be started, in levels: evaluation, short, elastic.

    evaluation   the learner waits for it
    short        few turns left (``actors.env.urgency``): they free their place soon, and complete a group
    elastic      the rest; how many may wait follows the load (``ElasticCapacity``)

Invariants:

- a higher level goes first; but after ``BURST`` takes in a row from higher levels, one of the elastic level is due, so
  that the elastic level is never starved: it gets at least one take in ``BURST`` + 1. Within a level: ``fairness``;
- no ticket waits longer than the time to live while time counts (it does not while nothing can be started): it is
  named by ``expired``. An evaluation's tickets have no bound but the evaluation's own;
- when far fewer may wait than do (``SURPLUS``; the rate of starts goes up and down by itself), ``overfull`` names whom
  to evict: the least recently used group, those first of which no member has been started, because nothing is lost with
  them. A group is used when one of its tickets begins to wait, is started or ends.

Time is handed in. Every operation but ``position`` takes time that does not grow with how many wait (but for a
logarithm).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Literal

import msgspec

from coordinator.scheduling.fairness import FairQueue, Item

Level = Literal["evaluation", "short", "elastic"]
LEVELS: tuple[Level, ...] = ("evaluation", "short", "elastic")
_ELASTIC_FIRST: tuple[Level, ...] = ("elastic", "evaluation", "short")
_MORTAL: tuple[Level, ...] = ("elastic", "short")

BURST = 8

TARGET_WAIT_S = 60.0
"""As many tickets may wait as are started in this time..."""
LEAST_ROUNDS = 2
"""...but always as many as there are places, this many times: places must never be free for want of tickets."""
SURPLUS = 2.0
"""So many times as many as may wait are too many: some are evicted. Below that it is enough to admit no more."""
MEMORY_S = 60.0
"""The rate of starts is an average over about this long."""


class ElasticCapacity:
    """How many tickets may wait: more the faster the cluster takes them up. By Little's law a ticket then waits about
    ``TARGET_WAIT_S`` at most, or ``LEAST_ROUNDS`` trajectories where those take longer."""

    def __init__(self) -> None:
        self._rate = 0.0  # starts per second
        self._since: float | None = None
        self._starts = 0
        self._capacity: float = math.inf

    @property
    def capacity(self) -> float:
        """Infinite until it is known how many places there are."""
        return self._capacity

    @property
    def rate(self) -> float:
        return self._rate

    def started(self, tickets: int) -> None:
        self._starts += tickets

    def measure(self, places: int | None, now: float) -> None:
        """``places``: where tickets are started now; None: nobody says, 0: none (then it stays as it is)."""
        elapsed = 0.0 if self._since is None else now - self._since
        if elapsed > 0:
            keep = math.exp(-elapsed / MEMORY_S)
            self._rate = keep * self._rate + (1 - keep) * self._starts / elapsed
        if elapsed > 0 or self._since is None:
            self._since, self._starts = now, 0
        if places is None:
            self._capacity = math.inf
        elif places:
            self._capacity = max(LEAST_ROUNDS * places, math.ceil(self._rate * TARGET_WAIT_S))


class Waiting(msgspec.Struct):
    """One ticket in a queue."""

    level: Level
    group: int
    since: float  # on the clock that stands still while nothing can be started


class LevelQueues:
    """See the module docstring."""

    def __init__(self, *, time_to_live_s: float) -> None:
        self._time_to_live_s = time_to_live_s
        self._queues: dict[Level, FairQueue] = {level: FairQueue() for level in LEVELS}
        self._waiting: dict[str, Waiting] = {}
        # group -> its elastic tickets, least recently used first; and the same, where a member was started
        self._fresh: OrderedDict[int, set[str]] = OrderedDict()
        self._begun: OrderedDict[int, set[str]] = OrderedDict()
        self._burst = 0
        self.elastic = ElasticCapacity()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, id_: str) -> bool:
        return id_ in self._waiting

    def ids(self) -> list[str]:
        return list(self._waiting)

    def count(self, level: Level) -> int:
        return len(self._queues[level])

    def flows(self, level: Level) -> dict[str, int]:
        """How many wait, by flow."""
        return self._queues[level].waiting

    def entry(self, id_: str) -> Waiting | None:
        return self._waiting.get(id_)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        for queue in self._queues.values():
            queue.set_weights(weights)

    def room(self, tickets: int, coming: int = 0) -> bool:
        """Whether so many more may wait beside those that do and those that are ``coming``. Whatever the bound, one
        group's may: else none would ever be begun."""
        waiting = len(self._queues["elastic"]) + coming
        return waiting == 0 or waiting + tickets <= self.elastic.capacity

    def add(self, item: Item, level: Level, now: float) -> None:
        """``now`` never goes back. One that waits already is left as it is."""
        if item.id in self._waiting:
            return
        self._waiting[item.id] = Waiting(level, item.group, now)
        self._queues[level].add(item)
        if level == "elastic":
            in_use = self._begun if item.group in self._begun else self._fresh
            in_use.setdefault(item.group, set()).add(item.id)
            in_use.move_to_end(item.group)

    def take(self) -> str | None:
        """The next one to start; None where none waits."""
        elastic_due = self._burst >= BURST and len(self._queues["elastic"]) > 0
        for level in _ELASTIC_FIRST if elastic_due else LEVELS:
            item = self._queues[level].take()
            if item is not None:
                self._burst = 0 if level == "elastic" else self._burst + 1
                self._forget(item.id)
                self.used(item.group, begun=True)
                return item.id
        return None

    def remove(self, id_: str) -> bool:
        """Whether it waited."""
        entry = self._waiting.get(id_)
        if entry is None:
            return False
        self._queues[entry.level].remove(id_)
        self._forget(id_)
        return True

    def used(self, group: int, *, begun: bool = False) -> None:
        """A member of a group was started or has ended."""
        if begun and group in self._fresh:
            self._begun[group] = self._fresh.pop(group)
        elif group in self._begun:
            self._begun.move_to_end(group)
        elif group in self._fresh:
            self._fresh.move_to_end(group)

    def expired(self, now: float) -> str | None:
        """One that has waited longer than the time to live, the oldest of its level; an evaluation's never has."""
        for level in _MORTAL:
            if self.oldest_s(level, now) > self._time_to_live_s:
                return next(iter(self._queues[level]))
        return None

    def overfull(self) -> str | None:
        """A ticket of the group to evict, if far more wait than may: never of the last one."""
        most = SURPLUS * self.elastic.capacity
        if len(self._queues["elastic"]) <= most or len(self._fresh) + len(self._begun) < 2:
            return None
        least = next(iter((self._fresh or self._begun).values()))
        return min(least)

    def position(self, id_: str) -> tuple[Level, int, int]:
        """Level, how many of its own flow are before it there, and how many wait on higher levels."""
        level = self._waiting[id_].level
        higher = sum(len(self._queues[other]) for other in LEVELS[: LEVELS.index(level)])
        return level, self._queues[level].before(id_), higher

    def oldest_s(self, level: Level, now: float) -> float:
        """How long the longest waiting one of a level has waited; 0 where none does."""
        first = next(iter(self._queues[level]), None)
        return 0.0 if first is None else now - self._waiting[first].since

    def _forget(self, id_: str) -> None:
        entry = self._waiting.pop(id_)
        if entry.level != "elastic":
            return
        in_use = self._begun if entry.group in self._begun else self._fresh
        in_use[entry.group].discard(id_)
        if not in_use[entry.group]:
            del in_use[entry.group]
