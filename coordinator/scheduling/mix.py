"""Which tasks are trained on, in which shares: named streams of tasks with weights.

Invariant: the next group goes to the stream that is furthest behind its share. So at every moment, while weights stay
as they are, no stream is ahead of its share by a whole group, and none is behind by more than the number of other
streams: one of weight w among weights that sum to W gets a group at least once in W/w times that number. The choice
depends on nothing but what was chosen before, so that a run that goes on from a checkpoint goes on with its order.

(Each choice adds weight/W to every stream's credit and takes 1 from the largest. Credits sum to 0, so the largest of n
is at least 1/n before 1 is taken: none falls to -1. As the n - 1 others are above -1 each, none exceeds n - 1.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from actors.env.protocol import FIRST_EVALUATION_TASK
from actors.settings import Settings


class TaskStream(Settings, frozen=True):
    """A range of training tasks, trained on in order and then again from its beginning."""

    weight: float = 1.0  # its share of the groups, relative to the other streams'; 0: none for now
    first: int = 0  # its first task
    count: int | None = None  # so many tasks; none: all there are from the first one on
    turns: int | None = None  # what its trajectories are expected to take, where that is below the step bound


class StreamState(msgspec.Struct, frozen=True):
    """Where a stream stands, as a checkpoint keeps it."""

    groups: int
    credit: float


EVERYTHING = "tasks"
"""The one stream of a job that names none."""


class Mix:
    """See the module docstring."""

    def __init__(self, streams: Mapping[str, TaskStream]) -> None:
        """No streams: one of all training tasks. Raises ``ValueError`` for streams that cannot be."""
        self._named = bool(streams)
        self._streams = dict(streams) or {EVERYTHING: TaskStream()}
        for name, stream in self._streams.items():
            _check(name, stream)
        self._weights = _shares({name: stream.weight for name, stream in self._streams.items()})
        self._groups = dict.fromkeys(self._streams, 0)
        self._credits = dict.fromkeys(self._streams, 0.0)

    def next(self) -> tuple[str, int]:
        """The stream and the task of the next group."""
        for name, share in self._weights.items():
            self._credits[name] += share
        name = max((name for name, share in self._weights.items() if share > 0), key=self._credits.__getitem__)
        self._credits[name] -= 1.0
        position = self._groups[name]
        self._groups[name] = position + 1
        stream = self._streams[name]
        return name, stream.first + position % _length(stream)

    @property
    def shares(self) -> dict[str, float]:
        """Of all groups, by stream; they sum to 1."""
        return dict(self._weights)

    @property
    def admitted(self) -> dict[str, int]:
        """Groups so far, by stream."""
        return dict(self._groups)

    def named(self, name: str) -> str:
        """A stream's name, where the job has given it one; else "", of which nobody has to hear."""
        return name if self._named else ""

    def turns(self, name: str) -> int | None:
        """How many turns a stream's trajectories are expected to take, where the job says so."""
        stream = self._streams.get(name)
        return None if stream is None else stream.turns

    def set_weights(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Other weights for the streams that are named, from now on; what was is not made up for. Returns the shares.
        Raises ``ValueError`` for an unknown name or an impossible weight, and changes nothing then."""
        unknown = sorted(set(weights) - set(self._streams))
        if unknown:
            raise ValueError(f"no stream of tasks {', '.join(unknown)}; there are {', '.join(self._streams)}")
        replaced = {
            name: msgspec.structs.replace(stream, weight=weights.get(name, stream.weight))
            for name, stream in self._streams.items()
        }
        for name, stream in replaced.items():
            _check(name, stream)
        self._weights = _shares({name: stream.weight for name, stream in replaced.items()})
        self._streams = replaced
        self._credits = dict.fromkeys(self._streams, 0.0)
        return self.shares

    def state(self) -> dict[str, StreamState]:
        return {name: StreamState(self._groups[name], self._credits[name]) for name in self._streams}

    def restore(self, state: Mapping[str, StreamState], groups: int) -> None:
        """``groups``: how many there were in all. A stream that the state does not know begins anew, unless it is the
        only one."""
        for name in self._streams:
            alone = StreamState(groups, 0.0) if len(self._streams) == 1 and not state else StreamState(0, 0.0)
            kept = state.get(name, alone)
            self._groups[name], self._credits[name] = kept.groups, kept.credit


def _length(stream: TaskStream) -> int:
    return FIRST_EVALUATION_TASK - stream.first if stream.count is None else stream.count


def _check(name: str, stream: TaskStream) -> None:
    if not 0 <= stream.weight < math.inf:
        raise ValueError(f"{name}.weight: expected 0 or more, found {stream.weight}")
    if not 0 <= stream.first < FIRST_EVALUATION_TASK:
        raise ValueError(f"{name}.first: training tasks are 0 to {FIRST_EVALUATION_TASK - 1}, found {stream.first}")
    if _length(stream) < 1 or stream.first + _length(stream) > FIRST_EVALUATION_TASK:
        raise ValueError(
            f"{name}.count: expected 1 to {FIRST_EVALUATION_TASK - stream.first}, so that none is held out, found "
            f"{stream.count}"
        )
    if stream.turns is not None and stream.turns < 1:
        raise ValueError(f"{name}.turns: expected 1 or more, found {stream.turns}")


def _shares(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    if total <= 0:
        raise ValueError(f"expected at least one weight above 0, found {dict(weights)}")
    return {name: weight / total for name, weight in weights.items()}
