"""A bounded mailbox: urgent messages first, the rest in order of arrival.

Invariant: neither kind ever grows past the bound; who offers more is told at once (``Overloaded``), so that pressure
reaches the sender instead of the memory. What has no sender to push back (``notice``: the end of a monitored actor) is
bounded by what its receiver asked for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from bus.message import Overloaded
from bus.prompt import Prompt

MAILBOX_BOUND = 10_000

_NONE_YET: deque[Any] = deque(maxlen=0)
"""In place of a queue that nothing was ever put in: an empty one takes 600 bytes, and most actors are idle."""


class Mailbox:
    """Single consumer."""

    __slots__ = ("_bell", "_bound", "_ordinary", "_owner", "_urgent", "_waits")

    def __init__(self, owner: str, bound: int) -> None:
        self._owner = owner
        self._bound = bound
        self._urgent = _NONE_YET
        self._ordinary: deque[Any] = deque()
        self._bell: Prompt[None] = Prompt(asyncio.get_running_loop())
        self._waits = False

    def __len__(self) -> int:
        return len(self._urgent) + len(self._ordinary)

    def put(self, item: Any, *, urgent: bool = False, at_once: bool = False) -> None:
        """Raises ``Overloaded`` when full; ordinary items take no room from urgent ones. ``at_once``: a consumer that
        waits takes it within this call, if no task runs."""
        if urgent and self._urgent is _NONE_YET:
            self._urgent = deque()
        queue = self._urgent if urgent else self._ordinary
        if len(queue) >= self._bound:
            raise Overloaded(f"{self._owner}: {self._bound} messages are waiting already")
        queue.append(item)
        if self._waits:
            self._ring(at_once)

    def notice(self, item: Any) -> None:
        """An ordinary item that is never refused."""
        self._ordinary.append(item)
        if self._waits:
            self._ring(at_once=False)

    def _ring(self, at_once: bool) -> None:
        self._waits = False
        self._bell.settle(None, at_once=at_once)

    def drain(self) -> list[Any]:
        """Everything that waits, in the order in which it would have been taken."""
        items = [*self._urgent, *self._ordinary]
        self._urgent.clear()
        self._ordinary.clear()
        return items

    async def filled(self) -> None:
        """Wait until there is something to take (an idle actor waits for work as long as it lives)."""
        while not self._urgent and not self._ordinary:
            self._bell.renew()
            self._waits = True
            await self._bell

    def take(self) -> Any | None:
        """The next item; None where somebody else has drained the mailbox."""
        queue = self._urgent or self._ordinary
        return queue.popleft() if queue else None
