"""One consumer's changes, oldest first; an end, and its reason, comes after all changes that preceded it.

Used on one event loop: adapters post to the loop before they call ``put`` or ``end``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from coordinator.metadata.protocol import Change


class ChangeQueue:
    """A ``Watch`` fed by a store. Holds what the consumer has not taken yet, so a consumer that stops reading closes
    it (``aclose``)."""

    def __init__(self, on_close: Callable[[ChangeQueue], object]) -> None:
        self._on_close = on_close
        self._changes: deque[Change] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._wake = asyncio.Event()

    def put(self, change: Change) -> None:
        if not self._ended:
            self._changes.append(change)
            self._wake.set()

    def end(self, error: BaseException | None = None) -> None:
        """No more changes; the consumer gets ``error`` once, then the end."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake.set()

    def __aiter__(self) -> ChangeQueue:
        return self

    async def __anext__(self) -> Change:
        while not self._changes:
            if self._ended:
                error, self._error = self._error, None
                if error is not None:
                    raise error
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._changes.popleft()

    async def aclose(self) -> None:
        self._changes.clear()
        self.end()
        self._error = None
        self._on_close(self)
