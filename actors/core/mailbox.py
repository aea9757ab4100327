"""A bounded mailbox: urgent messages first, the rest in order of arrival.

Invariant: it never grows past its bound; who offers more is told at once (``Overloaded``), so that pressure reaches
the sender instead of the memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from bus.message import Overloaded


class Mailbox:
    """Single consumer."""

    def __init__(self, owner: str, bound: int) -> None:
        self._owner = owner
        self._bound = bound
        self._urgent: deque[Any] = deque()
        self._ordinary: deque[Any] = deque()
        self._waiting: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._urgent) + len(self._ordinary)

    def put(self, item: Any, *, urgent: bool = False) -> None:
        """Raises ``Overloaded`` when full; urgent items always find room."""
        if not urgent and len(self._ordinary) >= self._bound:
            raise Overloaded(f"{self._owner}: {self._bound} messages are waiting already")
        (self._urgent if urgent else self._ordinary).append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def get(self) -> Any:
        """The next item; waits for one (an idle actor waits for work as long as it lives)."""
        while not self._urgent and not self._ordinary:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return (self._urgent or self._ordinary).popleft()
