"""How the event loop beside an engine's thread keeps out of its way: it rests while a step runs.

    thread:  a step ......  the next step ...................  and the next ....
    loop:    rests          deliver, rest, take in what came   deliver, rest ....

Why: the two share one interpreter, whose lock torch gives up at every operation and wants back at once. A loop that
handles a message in the middle of a step makes both threads wait for each other dozens of times, which costs more than
the message; and an order takes effect when the step is over anyway.

Invariants:

- the thread never waits for the loop;
- the loop rests for at most ``REST_S`` at a time, and not at all while it has long work of its own (``undisturbed``) or
  the thread has nothing to do. In a longer step it is free after that;
- it is free before a step ends, so that the requests which follow the last step's answers join the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

REST_S = 0.02
"""The longest rest of the loop."""

REST_SHARE = 0.6
"""How much of a step the loop rests at most, as far as the last step tells."""

ROUNDS = 2
"""Rounds of the loop between two rests, after the one that takes a step's result: sockets are read in the first, the
actors wake up in the second."""


class Turns(Generic[T]):
    """Made on the loop; ``ended`` and ``idle`` are the thread's, the rest is the loop's."""

    def __init__(self, take: Callable[[T], None]) -> None:
        """``take`` gets on the loop what the thread hands over, in order."""
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._results: SimpleQueue[T | None] = SimpleQueue()
        self._stepping = False  # a step follows the last one, as far as is known
        self._resting = False
        self._in_turn = False
        self._disturbances = 0
        self._ended_at = 0.0
        self._step_s = 0.0

    # ---- the thread ----------------------------------------------------------------------------------------------

    def ended(self, result: T) -> None:
        """Hand over what a step finished; as a rule another one follows."""
        now = time.monotonic()
        self._step_s, self._ended_at = now - self._ended_at, now
        self._stepping = True
        self._results.put(result)
        if not self._resting:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                self._loop.call_soon_threadsafe(self._turn)

    def idle(self) -> None:
        """No step follows: the loop need not rest."""
        self._stepping = False
        if self._resting:
            self._results.put(None)

    # ---- the loop ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """The loop has work of its own."""
        self._disturbances += 1
        try:
            yield
        finally:
            self._disturbances -= 1

    def _turn(self, first: T | None = None) -> None:
        """Take what was handed over; the loop rests again in ``ROUNDS`` rounds."""
        self._resting = False  # before looking: what is put from now on is announced
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
        self._turn(self._rest())

    def _rest(self) -> T | None:
        """Stand still until the step is over, which is what there is to wait for; None where that takes too long, or
        none follows."""
        self._resting = True  # before looking: a thread that becomes idle from now on says so
        if self._disturbances or not self._stepping:
            return None
        try:
            return self._results.get(timeout=min(REST_S, REST_SHARE * self._step_s))
        except Empty:
            return None
