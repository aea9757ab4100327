"""One engine of the proxy's pool: what is known of it, and what is with it.

Invariants:

- ``in_flight`` holds every request that was given to it and is not known to be answered or moved; those in ``outbox``
  are among them, and have not been sent yet;
- ``outstanding`` is the sum of what is left of what those claimed when they were given, and ``context`` of the tokens
  that they need room for: integers, which leave nothing behind when the last request goes;
- whoever orders engines by load is told of every change of it, and of state and version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from actors.core import Ref
from actors.proxy.engines.load import EngineLoad
from actors.proxy.engines.protocol import EngineLimits
from actors.proxy.messages import Add, EngineState

State = Literal["starting", "cold", "serving", "suspended", "dead", "removed"]

Kind = tuple[State, str, int | None]
"""State, hardware class, version: requests find engines alike that have these in common."""

NO_LIMITS = EngineLimits(max_sequences=1, max_model_len=1)
"""Of an engine that has not said any."""


class Claim(msgspec.Struct, frozen=True, gc=False):
    """What a request takes of an engine, in nanoseconds of its time and in tokens."""

    prefill_ns: int
    decode_ns: int
    sampled: int  # tokens that are expected to be sampled, 1 or more
    length: int  # tokens that it has in the end


def _nobody(entry: EngineEntry) -> None:
    """Who orders one engine?"""


class EngineEntry:
    """See the module docstring; the states are drawn in ``actors.proxy.proxy``."""

    def __init__(self, name: str, hardware_class: str, room: float = float("inf")) -> None:
        """``room``: tokens whose keys and values it can hold."""
        self.name = name
        self.hardware_class = hardware_class
        self.room = room
        self.host: Ref | None = None
        self.limits = NO_LIMITS
        self.restarts = 0
        self.in_flight: dict[str, Add] = {}
        self.outstanding = 0  # nanoseconds of its time
        self.context = 0  # tokens
        self.outbox: list[Add] = []
        self.ended: list[str] = []  # trajectories that it is still to be told of
        self.measured: EngineLoad | None = None
        self.measured_at = 0.0
        self.changed: Callable[[EngineEntry], None] = _nobody
        self.stamp = 0  # of the last change, for whoever orders engines
        self._claims: dict[str, Claim] = {}  # of what is in flight
        self._left: dict[str, int] = {}  # nanoseconds, likewise
        self._last = 0  # nanoseconds of what was given last
        self._state: State = "starting"
        self._version: int | None = None
        self._emptied = 0
        self.kind: Kind = (self._state, hardware_class, self._version)

    # ---- what it is ----------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        self._change_kind()

    @property
    def version(self) -> int | None:
        return self._version

    @version.setter
    def version(self, version: int | None) -> None:
        self._version = version
        self._change_kind()

    def _change_kind(self) -> None:
        self.kind = self._state, self.hardware_class, self._version
        self.changed(self)

    @property
    def emptied(self) -> int:
        """Places that count as taken, because they were emptied on purpose."""
        return self._emptied

    @emptied.setter
    def emptied(self, places: int) -> None:
        self._emptied = places
        self.changed(self)

    def ready(self, host: Ref, limits: EngineLimits) -> None:
        """Its host is up, and has no weights."""
        self.host, self.limits, self._version = host, limits, None
        self.state = "cold"

    def lose(self, state: State) -> None:
        """Its process is gone; ``in_flight`` is left to be moved."""
        self.host, self.measured, self._version, self._emptied = None, None, None, 0
        self.outbox.clear()
        self.ended.clear()
        self.state = state

    # ---- what is with it -----------------------------------------------------------------------------------------

    def give(self, add: Add, claim: Claim) -> None:
        id_ = add.request.request_id
        self.in_flight[id_] = add
        self._claims[id_] = claim
        self._left[id_] = self._last = claim.prefill_ns + claim.decode_ns
        self.outstanding += self._last
        self.context += claim.length
        self.changed(self)

    def advanced(self, sampled: Iterable[tuple[str, int]]) -> None:
        """It has told that requests have so many tokens by now, without what they had brought. Others are ignored."""
        for id_, count in sampled:
            claim = self._claims.get(id_)
            if claim is not None and count > 0:
                # One that is longer than was expected is taken to end with its next token.
                left = claim.decode_ns * max(1, claim.sampled - count) // claim.sampled
                self.outstanding += left - self._left[id_]
                self._left[id_] = left
        self.changed(self)

    def take(self, request_id: str) -> Add | None:
        """It is here no more; None where it was not."""
        add = self.in_flight.pop(request_id, None)
        if add is not None:
            self.outstanding -= self._left.pop(request_id)
            self.context -= self._claims.pop(request_id).length
            self.changed(self)
        return add

    def take_all(self) -> dict[str, Add]:
        taken, self.in_flight = self.in_flight, {}
        self._claims.clear()
        self._left.clear()
        self.outstanding = self.context = 0
        self.changed(self)
        return taken

    # ---- how loaded it is ----------------------------------------------------------------------------------------

    @property
    def load(self) -> float:
        """Requests per place of the running batch."""
        return (len(self.in_flight) + self._emptied) / self.limits.max_sequences

    @property
    def full(self) -> bool:
        """Another request would wait for a place or, if it is as long as those that are here, for room."""
        count = len(self.in_flight)
        return count + self._emptied >= self.limits.max_sequences or self.context * (count + 1) > self.room * count

    @property
    def ahead(self) -> int:
        """Nanoseconds of its time that are spoken for. A place that was emptied counts as what was given last."""
        return self.outstanding + self._emptied * self._last

    def describe(self, now: float, trajectories: int, gave_s: float | None, took_s: float | None) -> EngineState:
        """``now``: loop time; ``trajectories`` have their prefix here; ``gave_s``, ``took_s``: ago."""
        return EngineState(
            self.name,
            self.state,
            self.hardware_class,
            self.version,
            len(self.in_flight),
            self.restarts,
            self.limits.max_sequences,
            dict(Counter(add.domain for add in self.in_flight.values())),
            trajectories,
            self.measured,
            0.0 if self.measured is None else now - self.measured_at,
            gave_s,
            took_s,
        )
