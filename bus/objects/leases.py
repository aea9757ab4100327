"""Who keeps an object: the holds of its own node, and the leases of others.

Invariant: an object lives exactly as long as at least one lease on it does; a lease ends once: given back, expired, or
with the incarnation of the node that had it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

Key = tuple[str, int, int]
"""Node, its epoch, its number for the lease. The owner's own: an empty name."""


class Lease:
    """One reason for one object to live."""

    __slots__ = ("deadline", "key", "object", "reads", "term_s", "timer")

    def __init__(self, key: Key, object_: int, *, reads: bool, term_s: float | None) -> None:
        """``reads``: its bytes must stay where they are; ``term_s``: None is for ever."""
        self.key = key
        self.object = object_
        self.reads = reads
        self.term_s = term_s
        self.deadline = 0.0
        self.timer: asyncio.TimerHandle | None = None


class Leases:
    """Of all objects of one node. Pure bookkeeping, and timers."""

    def __init__(self, ended: Callable[[Lease, str], None]) -> None:
        """``ended``: told of each lease that ends otherwise than by being given back, and why."""
        self._ended = ended
        self._by_key: dict[Key, Lease] = {}
        self._of: dict[int, dict[Key, Lease]] = {}  # object -> its leases

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, lease: Lease) -> None:
        """Unless there is one of this key already: its request came twice."""
        if lease.key in self._by_key:
            return
        self._by_key[lease.key] = lease
        self._of.setdefault(lease.object, {})[lease.key] = lease
        if lease.term_s is not None:
            loop = asyncio.get_running_loop()
            lease.deadline = loop.time() + lease.term_s
            lease.timer = loop.call_at(lease.deadline, self._due, lease)

    def get(self, key: Key) -> Lease | None:
        return self._by_key.get(key)

    def renew(self, key: Key) -> bool:
        """Whether there still was something to renew."""
        lease = self._by_key.get(key)
        if lease is None:
            return False
        if lease.term_s is not None:
            lease.deadline = asyncio.get_running_loop().time() + lease.term_s
        return True

    def _due(self, lease: Lease) -> None:
        """A timer is set once for each term, not for each renewal."""
        loop = asyncio.get_running_loop()
        if loop.time() < lease.deadline:
            lease.timer = loop.call_at(lease.deadline, self._due, lease)
        else:
            self.remove(lease.key)
            self._ended(lease, "expired")

    def remove(self, key: Key) -> Lease | None:
        lease = self._by_key.pop(key, None)
        if lease is not None:
            if lease.timer is not None:
                lease.timer.cancel()
            of = self._of[lease.object]
            del of[key]
            if not of:
                del self._of[lease.object]
        return lease

    def end(self, name: str, epoch: int, why: str) -> None:
        """All leases of a node's incarnation, and of those before it, have ended."""
        for key in [key for key in self._by_key if key[0] == name and key[1] <= epoch]:
            lease = self.remove(key)
            if lease is not None:
                self._ended(lease, why)

    def on(self, object_: int) -> Iterable[Lease]:
        """What keeps an object."""
        return self._of.get(object_, {}).values()

    def reads(self, object_: int) -> bool:
        """Whether somebody reads an object's bytes."""
        return any(lease.reads for lease in self.on(object_))

    def forget(self, object_: int) -> None:
        """An object has gone otherwise than by its leases."""
        for lease in list(self.on(object_)):
            self.remove(lease.key)
