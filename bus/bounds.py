"""How much one peer may put on a node, so that none starves the others or swells the node.

Invariants: what of one peer waits for its handlers never exceeds the bounds, in number or in bytes (a single message of
any permitted size always gets in); a peer that sends what cannot be read is muted once it does so too often. Whoever
waits for an answer is told which bound it exceeded; everything refused is counted.

Accounts are by name of the node where a message can be read, and by routing id where it cannot; with a key file both
belong to the key (``bus.authentication``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from bus.codec import Frame

ACCOUNTS_AT_MOST = 10_000
"""Peers whose unreadable messages are remembered; those that sent the last one longest ago are forgotten first."""

MAX_MESSAGE_BYTES = 4 << 30
"""All frames of one message."""

MAX_FRAMES = 65_536
"""Of one message: a header, a body, and one for each large array."""

MESSAGE_OVERHEAD_BYTES = 256
"""What a waiting message costs at least."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For each peer of a node."""

    queued_messages: int = 8_000  # that no handler has taken yet: fewer than a mailbox holds, so that others get in
    queued_bytes: int = 1 << 30
    messages_per_stretch: int = 125_000  # requests of one peer in a stretch of time
    stretch_s: float = 0.5
    kept_answers: int = 50_000  # to asks with retries that the peer says it still waits for
    kept_bytes: int = 256 << 20  # of such answers
    unreadable_per_s: float = 100.0  # on average; ten seconds' worth may come at once
    muted_s: float = 5.0  # for how long a peer is not heard that sends more of it
    peers: int = 10_000  # nodes, of different names, that are known at a time


def check_message(frames: Sequence[Frame]) -> None:
    """Raises ``ValueError`` for a message that is too large to be sent."""
    if len(frames) > MAX_FRAMES:
        raise ValueError(f"a message with {len(frames)} frames: at most {MAX_FRAMES} travel in one")
    size = sum(map(len, frames))
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes: at most {MAX_MESSAGE_BYTES} travel in one")


class Bucket:
    """A token bucket: ``rate`` a second on average, ``burst`` at once."""

    __slots__ = ("_at", "_burst", "_rate", "_tokens")

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._at = 0.0

    def take(self, now: float) -> bool:
        """Whether one more is within the rate."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class Account:
    """What one peer has waiting here; a message that waits no longer is taken off both by who knows it. On the way of
    every request, so written to be cheap."""

    __slots__ = ("_bounds", "_came", "_until", "bytes", "messages")

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._came = 0  # in the present stretch of time
        self._until = 0.0
        self.messages = 0
        self.bytes = 0

    def add(self, size: int, now: float) -> str:
        """Let a message wait; what is in the way of that, if anything is."""
        bounds = self._bounds
        if now >= self._until:
            self._until = now + bounds.stretch_s
            self._came = 0
        self._came += 1
        total = self.bytes + size
        if self._came > bounds.messages_per_stretch:
            return f"more than {bounds.messages_per_stretch} messages came in {bounds.stretch_s:g} s"
        if self.messages >= bounds.queued_messages:
            return f"{bounds.queued_messages} messages wait already"
        if total > bounds.queued_bytes and (self.messages or size > MAX_MESSAGE_BYTES):
            return f"messages of {bounds.queued_bytes} bytes wait already"
        self.messages += 1
        self.bytes = total
        return ""


class Mutes:
    """Who has sent too much that cannot be read."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._buckets: OrderedDict[bytes, Bucket] = OrderedDict()
        self.until: dict[bytes, float] = {}  # empty as long as nobody misbehaves

    def muted(self, routing_id: bytes, now: float) -> bool:
        """Whether a peer is not heard at the moment."""
        until = self.until.get(routing_id)
        if until is None:
            return False
        if now < until:
            return True
        del self.until[routing_id]
        return False

    def unreadable(self, routing_id: bytes, now: float) -> bool:
        """Note a message that could not be read; True where its sender is muted for it."""
        bucket = self._buckets.get(routing_id)
        if bucket is None:
            rate = self._bounds.unreadable_per_s
            bucket = self._buckets[routing_id] = Bucket(rate, max(10 * rate, 1.0))
            if len(self._buckets) > ACCOUNTS_AT_MOST:
                oldest, _ = self._buckets.popitem(last=False)
                self.until.pop(oldest, None)
        self._buckets.move_to_end(routing_id)
        if bucket.take(now):
            return False
        self.until[routing_id] = now + self._bounds.muted_s
        return True
