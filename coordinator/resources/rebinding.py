"""When a task's requests move to another pool: a pure decision with hysteresis, over what each pool has in flight.

Invariant: a task is moved only from a pool that has been over ``high`` for ``hold_s`` without a break to one that has
been under ``low`` for as long, and only where the move would leave the other pool less loaded than this one is; then it
stays for ``rest_s`` at least. It goes home to its preferred pool once that has been under ``low`` for ``hold_s`` and
would stay halfway between the marks with the task's own requests: what drove it out is then gone, so that a load that
does not change moves nothing to and fro. One move a decision, and its effect is waited for: the
marks of both pools count from it.

Load is requests in flight per place in the running batches of a pool's engines (``actors.proxy``): above 1, some wait.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """When to move."""

    high: float = 0.9
    low: float = 0.5
    hold_s: float = 10.0
    rest_s: float = 60.0


class PoolLoad(msgspec.Struct, frozen=True):
    """The engines of one hardware class."""

    places: int  # in their running batches together
    in_flight: dict[str, int]  # requests by task

    @property
    def load(self) -> float:
        return sum(self.in_flight.values()) / self.places

    def with_task(self, requests: int) -> float:
        """Its load with so many requests more."""
        return self.load + requests / self.places


class Task(msgspec.Struct, frozen=True):
    """Where one task's requests go."""

    preferred: str
    bound: str
    since_s: float = float("-inf")  # of the last move


class Move(msgspec.Struct, frozen=True):
    """A task goes to another pool; ``reason`` is for people."""

    task: str
    origin: str
    to: str
    reason: str


class State(msgspec.Struct, frozen=True):
    """What the next decision has to know: the tasks, and since when each pool is over or under its mark."""

    tasks: dict[str, Task]
    high_since_s: dict[str, float] = {}
    low_since_s: dict[str, float] = {}


def decide(
    state: State, pools: Mapping[str, PoolLoad], now_s: float, marks: Marks | None = None
) -> tuple[State, Move | None]:
    """The state after a look at the pools that serve (class -> load), and what to do, if anything."""
    marks = marks if marks is not None else Marks()
    high = _since(state.high_since_s, {name for name, pool in pools.items() if pool.load >= marks.high}, now_s)
    low = _since(state.low_since_s, {name for name, pool in pools.items() if pool.load <= marks.low}, now_s)
    rested = {name: task for name, task in sorted(state.tasks.items()) if now_s - task.since_s >= marks.rest_s}
    calm = _held(low, now_s, marks)
    move = _home(rested, pools, calm, marks) or _away(rested, pools, _held(high, now_s, marks), calm)
    tasks = dict(state.tasks)
    if move is not None:
        tasks[move.task] = Task(tasks[move.task].preferred, move.to, now_s)
        for since in (high, low):  # both pools are looked at afresh: what was seen there was before the move
            for name in (move.origin, move.to):
                since.pop(name, None)
    return State(tasks, high, low), move


def _since(before: Mapping[str, float], now_in: set[str], now_s: float) -> dict[str, float]:
    return {name: before.get(name, now_s) for name in sorted(now_in)}


def _held(since: Mapping[str, float], now_s: float, marks: Marks) -> set[str]:
    return {name for name, from_s in since.items() if now_s - from_s >= marks.hold_s}


def _home(tasks: Mapping[str, Task], pools: Mapping[str, PoolLoad], calm: set[str], marks: Marks) -> Move | None:
    for name, task in tasks.items():
        if task.bound == task.preferred or task.preferred not in calm:
            continue
        requests = pools[task.bound].in_flight.get(name, 0) if task.bound in pools else 0
        if pools[task.preferred].with_task(requests) <= (marks.low + marks.high) / 2:
            return Move(name, task.bound, task.preferred, _said(task.preferred, pools, "calm again"))
    return None


def _away(tasks: Mapping[str, Task], pools: Mapping[str, PoolLoad], full: set[str], calm: set[str]) -> Move | None:
    """The task with the fewest requests first: moving it disturbs least."""
    movable = [(pools[task.bound].in_flight.get(name, 0), name) for name, task in tasks.items() if task.bound in full]
    for requests, name in sorted(movable):
        origin = tasks[name].bound
        for to in sorted(calm, key=lambda pool: (pools[pool].load, pool)):
            if requests and pools[to].with_task(requests) < pools[origin].load:
                return Move(name, origin, to, f"{_said(origin, pools, 'full')}, {_said(to, pools, 'calm')}")
    return None


def _said(name: str, pools: Mapping[str, PoolLoad], word: str) -> str:
    return f"{name} is {word} (load {pools[name].load:.2f})"
