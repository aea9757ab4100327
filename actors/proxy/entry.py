"""One engine of the proxy's pool: what is known of it, and what is with it.

Invariant: ``in_flight`` holds every request that was given to it and is not known to be answered or moved; those in
``outbox`` are among them, and have not been sent yet.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from actors.core import Ref
from actors.proxy.engines.load import EngineLoad
from actors.proxy.engines.protocol import EngineLimits
from actors.proxy.messages import Add, EngineState

State = Literal["starting", "cold", "serving", "suspended", "dead", "removed"]


class EngineEntry:
    """See the module docstring; the states are drawn in ``actors.proxy.proxy``."""

    def __init__(self, name: str, hardware_class: str) -> None:
        self.name = name
        self.hardware_class = hardware_class
        self.state: State = "starting"
        self.host: Ref | None = None
        self.limits = EngineLimits(max_sequences=1, max_model_len=1)
        self.version: int | None = None
        self.restarts = 0
        self.in_flight: dict[str, Add] = {}
        self.outbox: list[Add] = []
        self.ended: list[str] = []  # trajectories that it is still to be told of
        self.emptied = 0  # places that count as taken, because they were emptied on purpose
        self.measured: EngineLoad | None = None
        self.measured_at = 0.0

    @property
    def load(self) -> float:
        """For routing: requests per place of the running batch."""
        return (len(self.in_flight) + self.emptied) / self.limits.max_sequences

    def lose(self) -> None:
        """Its process is gone; ``in_flight`` is left to be moved."""
        self.host, self.version, self.measured, self.emptied = None, None, None, 0
        self.outbox.clear()
        self.ended.clear()

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
