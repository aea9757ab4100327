"""What may happen in a history: calls and faults, one after another, drawn by hypothesis."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from hypothesis import strategies as st

NODES = 3

Whom = Literal["newest", "first", "any", "nobody", "named"]
"""The newest incarnation of a node, its first one, whichever answers at its address, an actor that is not there, or
whatever a name stands for."""


class Tell(msgspec.Struct, frozen=True):
    source: int
    target: int
    lane: int
    whom: Whom
    count: int = 1


class Ask(msgspec.Struct, frozen=True):
    source: int
    target: int
    lane: int
    whom: Whom
    retries: int
    timeout_s: float
    delay_s: float = 0.0  # of its handler
    fails: bool = False
    leave_s: float = 0.0  # when its asker is cancelled; 0 is never
    blocking: bool = False  # its handler keeps others waiting meanwhile
    kilobytes: int = 0  # of an array that goes with it
    by_handle: bool = False  # as an object that its handler fetches


class Stream(msgspec.Struct, frozen=True):
    source: int
    target: int
    lane: int
    whom: Whom
    items: int
    timeout_s: float
    pace_s: float = 0.0  # between two items that the reader takes
    leave: int = -1  # after how many items, if any, its reader leaves


class Wait(msgspec.Struct, frozen=True):
    seconds: float


class End(msgspec.Struct, frozen=True):
    """A node ends, and the next incarnation starts (``again``), at the same place or another."""

    node: int
    killed: bool
    again: bool
    same_place: bool
    late_s: float = 0.0  # until its actor is there


class Part(msgspec.Struct, frozen=True):
    """One node against the others."""

    node: int
    cut: bool


class Heal(msgspec.Struct, frozen=True):
    pass


class Cut(msgspec.Struct, frozen=True):
    source: int
    target: int


class Lose(msgspec.Struct, frozen=True):
    """A node is told that another one is gone, whether it is or not."""

    source: int
    target: int


class Watch(msgspec.Struct, frozen=True):
    source: int
    target: int
    silence_s: float


class Monitor(msgspec.Struct, frozen=True):
    """A node asks to be told when another one's actor ends."""

    source: int
    target: int
    whom: Whom
    leave_s: float = 0.0  # when that is taken back; 0 is never


Step = Tell | Ask | Stream | Wait | End | Part | Heal | Cut | Lose | Watch | Monitor


class Weather(msgspec.Struct, frozen=True):
    """What links do to messages: see ``bus.simulated.Link``."""

    jitter_s: float = 0.0
    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0


class Plan(msgspec.Struct, frozen=True):
    seed: int
    weather: Weather
    steps: list[Step]
    crowded: bool = False  # mailboxes and connections hold hardly anything

    @property
    def calm(self) -> bool:
        """Whether everything must succeed."""
        gentle = self.weather.loss == 0 and self.orderly and not self.crowded
        rough = any(isinstance(step, End | Part | Cut | Lose | Watch) for step in self.steps)
        return gentle and not rough and not any(isinstance(step, Ask) and step.blocking for step in self.steps)

    @property
    def orderly(self) -> bool:
        """Whether the network neither doubles nor overtakes."""
        return self.weather.duplication == 0 and self.weather.reordering == 0


node = st.integers(0, NODES - 1)
pair = st.sampled_from(list(itertools.permutations(range(NODES), 2)))
lane = st.sampled_from([0, 0, 1])
whom: st.SearchStrategy[Whom] = st.sampled_from([*["newest"] * 5, "first", "first", "any", "nobody"])


def _between(step: Callable[..., Step], *rest: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    """From one node to another."""
    return st.builds(lambda both, *facts: step(*both, *facts), pair, *rest)


never = st.just(0.0)
tells = _between(Tell, lane, whom, st.integers(1, 5))
asks = _between(
    Ask,
    lane,
    whom,
    st.sampled_from([0, 1, 3, 10]),
    st.sampled_from([0.5, 5.0, 20.0]),
    st.sampled_from([0.0, 0.0, 0.3, 3.0]),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([0.0, 0.0, 0.0, 0.0002, 1.0]),
    st.sampled_from([False, False, False, False, True]),
)
streams = _between(
    Stream,
    lane,
    whom,
    st.integers(0, 60),
    st.sampled_from([0.5, 5.0]),
    st.sampled_from([0.0, 0.0, 0.02]),
    st.sampled_from([-1, -1, -1, 1, 3, 20]),
)
monitors = _between(Monitor, whom, st.sampled_from([0.0, 0.0, 0.0003, 1.0]))
calls = [tells, asks, streams, monitors]

newest = st.just("newest")
floods = _between(Tell, lane, newest, st.integers(3, 10))
blocks = _between(
    Ask, lane, newest, st.sampled_from([0, 3]), st.just(5.0), st.just(0.3), st.just(False), never, st.just(True)
)

waits = st.builds(Wait, st.sampled_from([0.0001, 0.0005, 0.002, 0.1, 3.0]))
ends = st.builds(End, node, st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0.0, 0.0, 0.1, 3.0]))
faults: list[st.SearchStrategy[Step]] = [
    ends,
    st.builds(Part, node, st.booleans()),
    st.builds(Heal),
    _between(Cut),
    _between(Lose),
    _between(Watch, st.sampled_from([1.0, 3.0])),
]

jitter = st.sampled_from([0.0, 0.0005, 0.01])
share = st.sampled_from([0.0, 0.0, 0.02, 0.2])
still = st.builds(Weather, jitter)
lossy = st.builds(Weather, jitter, share)
wild = st.builds(Weather, jitter, share, share, share)


def histories(
    weather: st.SearchStrategy[Weather], *steps: st.SearchStrategy[Step], crowded: bool = False
) -> st.SearchStrategy[Plan]:
    """Short ones, which are what a failure shrinks to, and long ones, which hypothesis would hardly draw by itself."""
    rows = (st.lists(st.one_of(*steps), min_size=least, max_size=60) for least in (1, 15, 30))
    return st.builds(Plan, st.integers(0, 2**32 - 1), weather, st.one_of(*rows), st.just(crowded))


plans = st.one_of(
    histories(still, *calls, *calls, waits),
    histories(lossy, *calls, *calls, *calls, waits, waits, waits, *faults),
    histories(wild, *calls, *calls, *calls, waits, waits, waits, *faults),
    histories(lossy, *calls, floods, floods, blocks, blocks, waits, waits, *faults, crowded=True),
)

# Of one kind each, for faults that show in few others.
retries = histories(lossy, asks, asks, waits)
calm = histories(still, asks, tells, waits)
full = histories(still, floods, blocks, waits, crowded=True)
watches = histories(still, monitors, waits, ends)
