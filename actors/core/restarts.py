"""How often, and how soon, something that failed is started again.

Invariant: never more than ``at_most`` restarts within any ``within_s`` seconds of the event loop's time; who asks for
one more is told to give up.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec


class Restarts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The default is for transient faults: at once, three times in a life."""

    at_most: int = 3
    within_s: float = math.inf
    first_wait_s: float = 0.0  # before the first restart of a window; doubled for each further one
    longest_wait_s: float = 5.0

    def __post_init__(self) -> None:
        if self.at_most < 0 or not self.within_s > 0 or self.first_wait_s < 0 or self.longest_wait_s < 0:
            raise ValueError(f"{self}: expected at_most >= 0, within_s > 0 and waits >= 0")


NEVER = Restarts(at_most=0)


class Budget:
    """What is left of some ``Restarts``."""

    def __init__(self, restarts: Restarts) -> None:
        self._restarts = restarts
        self._spent: deque[float] = deque()

    def spend(self, now: float) -> float | None:
        """Take one restart: seconds to wait before it, or None where there is none left."""
        limits = self._restarts
        while self._spent and now - self._spent[0] > limits.within_s:
            self._spent.popleft()
        earlier = len(self._spent)
        if earlier >= limits.at_most:
            return None
        self._spent.append(now)
        doublings = min(earlier, 63)  # more would overflow a float before it is capped
        return min(limits.first_wait_s * 2.0**doublings, limits.longest_wait_s)
