"""What may happen in a history: calls and faults, one after another, drawn by hypothesis."""

from __future__ import annotations

from typing import Literal

import msgspec
from hypothesis import strategies as st

NODES = 3

Whom = Literal["newest", "first", "any", "nobody"]
"""The newest incarnation of a node, its first one, whichever answers at its address, or an actor that is not there."""


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
    """What links do to messages."""

    jitter_s: float = 0.0
    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0


class Plan(msgspec.Struct, frozen=True):
    seed: int
    weather: Weather
    steps: list[Step]

    @property
    def calm(self) -> bool:
        """Whether everything must succeed."""
        gentle = self.weather.loss == 0 and self.orderly
        return gentle and not any(isinstance(step, End | Part | Cut | Lose | Watch) for step in self.steps)

    @property
    def orderly(self) -> bool:
        """Whether the network neither doubles nor overtakes."""
        return self.weather.duplication == 0 and self.weather.reordering == 0


node = st.integers(0, NODES - 1)
lane = st.sampled_from([0, 0, 1])
whom: st.SearchStrategy[Whom] = st.sampled_from([*["newest"] * 5, "first", "first", "any", "nobody"])

monitors = st.builds(Monitor, node, node, whom, st.sampled_from([0.0, 0.0, 0.0003, 1.0]))
calls = [
    st.builds(Tell, node, node, lane, whom, st.integers(1, 5)),
    st.builds(
        Ask,
        node,
        node,
        lane,
        whom,
        st.sampled_from([0, 1, 3, 10]),
        st.sampled_from([0.5, 5.0, 20.0]),
        st.sampled_from([0.0, 0.0, 0.3, 3.0]),
        st.sampled_from([False, False, False, True]),
        st.sampled_from([0.0, 0.0, 0.0, 0.0002, 1.0]),
    ),
    st.builds(
        Stream,
        node,
        node,
        lane,
        whom,
        st.integers(0, 60),
        st.sampled_from([0.5, 5.0]),
        st.sampled_from([0.0, 0.0, 0.02]),
        st.sampled_from([-1, -1, -1, 1, 3, 20]),
    ),
    monitors,
]
waits = st.builds(Wait, st.sampled_from([0.0001, 0.0005, 0.002, 0.1, 3.0]))
ends = st.builds(End, node, st.booleans(), st.booleans(), st.booleans())
faults = [
    ends,
    st.builds(Part, node, st.booleans()),
    st.builds(Heal),
    st.builds(Cut, node, node),
    st.builds(Lose, node, node),
    st.builds(Watch, node, node, st.sampled_from([1.0, 3.0])),
]
share = st.sampled_from([0.0, 0.0, 0.02, 0.2])
weather = st.builds(Weather, st.sampled_from([0.0, 0.0005, 0.01]), share, share, share)
still = st.builds(Weather, st.sampled_from([0.0, 0.0005, 0.01]))
rough = st.builds(Weather, st.sampled_from([0.0, 0.0005, 0.01]), share)


def _lists(steps: st.SearchStrategy[Step]) -> st.SearchStrategy[list[Step]]:
    """Short ones, which are what a failure shrinks to, and long ones, which hypothesis would hardly draw by itself."""
    return st.one_of(*(st.lists(steps, min_size=least, max_size=60) for least in (1, 15, 30)))


stormy = _lists(st.one_of(*calls, *calls, *calls, waits, waits, waits, *faults))
quiet = _lists(st.one_of(*calls, *calls, waits))

seeds = st.integers(0, 2**32 - 1)
plans = st.one_of(
    st.builds(Plan, seeds, still, quiet),
    st.builds(Plan, seeds, rough, stormy),
    st.builds(Plan, seeds, weather, stormy),
)

watches = st.builds(Plan, seeds, still, _lists(st.one_of(monitors, waits, ends)))
"""Hardly anything but monitors and deaths."""
