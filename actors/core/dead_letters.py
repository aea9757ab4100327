"""What could not be delivered: counted, and the newest of it kept to look at."""

from __future__ import annotations

from collections import deque

import msgspec

KEPT = 100


class DeadLetter(msgspec.Struct, frozen=True):
    """A message that reached no handler."""

    ago_s: float  # of the event loop's time
    to: str
    type: str
    sender: str  # the node it came from, or the actor whose timer it was
    why: str


class DeadLetters:
    """Who, what, when and why, of the last ``KEPT``."""

    def __init__(self) -> None:
        self._ring: deque[tuple[float, str, str, str, str]] = deque(maxlen=KEPT)

    def add(self, now: float, to: str, type_: str, sender: str, why: str) -> None:
        self._ring.append((now, to, type_, sender, why))

    def newest_first(self, now: float) -> list[DeadLetter]:
        return [DeadLetter(now - then, *rest) for then, *rest in reversed(self._ring)]
