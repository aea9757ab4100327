"""How the engine's thread and the event loop beside it share one interpreter: they take turns.

    thread:  a step ...........  hand over what it finished, wait  the next step ....
    loop:    rests                deliver; take what has arrived    rests

Why: torch gives the interpreter's lock up at every operation and wants it back at once. A loop that handles a few
messages during a step makes both threads wait for each other dozens of times, which costs more than the messages.

Invariants:

- the loop rests at most ``REST_S`` at a time, the thread waits at most ``TURN_S``: whatever one of them does, the other
  goes on;
- what had reached this process when a step ended takes effect before the next one, within those bounds;
- nobody waits while the loop has long work of its own (``undisturbed``) or the thread has nothing to do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

REST_S = 0.02
"""The longest rest of the loop. Longer steps leave it free after that."""

TURN_S = 0.005
"""The longest wait of the thread for the loop's turn."""

ROUNDS = 2
"""Rounds of the loop in a turn, after the first: sockets are read in one, in the next the actors wake up."""


class Turns(Generic[T]):
    """Made on the loop; ``ended`` and ``idle`` are the thread's, the rest is the loop's."""

    def __init__(self, take: Callable[[T], None]) -> None:
        """``take`` gets on the loop what the thread hands over, in order."""
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._results: SimpleQueue[T | None] = SimpleQueue()
        self._over: SimpleQueue[None] = SimpleQueue()
        self._stepping = False  # a step follows each turn, as far as is known
        self._resting = False
        self._in_turn = False
        self._disturbances = 0

    # ---- the thread ----------------------------------------------------------------------------------------------

    def ended(self, result: T) -> None:
        """Hand over what a step finished and give the loop its turn."""
        while not self._over.empty():  # of a turn that took too long
            self._over.get_nowait()
        self._stepping = True
        self._results.put(result)
        if not self._resting:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                self._loop.call_soon_threadsafe(self._turn)
        if not self._disturbances:
            with contextlib.suppress(Empty):
                self._over.get(timeout=TURN_S)

    def idle(self) -> None:
        """No step follows: the loop need not rest."""
        self._stepping = False
        if self._resting:
            self._results.put(None)

    # ---- the loop ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """The loop has work of its own, and the thread goes on beside it."""
        self._disturbances += 1
        try:
            yield
        finally:
            self._disturbances -= 1

    def _turn(self, first: T | None = None) -> None:
        """Take what was handed over; after ``ROUNDS`` more rounds it is the thread's turn again."""
        self._resting = False
        results = [] if first is None else [first]
        while not self._results.empty():
            result = self._results.get_nowait()
            if result is not None:
                results.append(result)
        for result in results:
            self._take(result)
        if results and not self._in_turn:
            self._in_turn = True
            self._loop.call_soon(self._round, ROUNDS)

    def _round(self, left: int) -> None:
        if left:
            self._loop.call_soon(self._round, left - 1)
            return
        self._in_turn = False
        self._resting = True  # said before the thread goes on, which may become idle at once
        self._over.put(None)
        self._turn(self._rest())

    def _rest(self) -> T | None:
        """Stand still until the step is over, which is what there is to wait for; None where that takes too long, or
        none follows."""
        if self._disturbances or not self._stepping:
            return None
        try:
            return self._results.get(timeout=REST_S)
        except Empty:
            return None
