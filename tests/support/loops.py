"""Running actors inside a test: a loop with a deadline, and waiting for something to become true."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

DEADLINE_S = 20.0
"""No test waits longer; it bounds failures, and says nothing of how long success takes."""


def run(work: Coroutine[Any, Any, T], deadline_s: float = DEADLINE_S) -> T:
    """Run a test's coroutine on a loop of its own. Raises ``TimeoutError`` where it does not end."""
    return asyncio.run(asyncio.wait_for(work, deadline_s))


async def until(holds: Callable[[], object]) -> None:
    """Give everything else its turn until ``holds()``; ``run`` bounds the wait."""
    while True:
        if holds():
            return
        await asyncio.sleep(0.001)


async def settle(turns: int = 100) -> None:
    """Let everything that is ready on this loop run: for what must *not* happen between actors of one node."""
    for _ in range(turns):
        await asyncio.sleep(0)
