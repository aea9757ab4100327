"""How an engine's thread and the event loop beside it take turns: the loop rests while a step runs, the thread while
the loop delivers.

    thread:  a step ....  waits                        a step ....  a step ....  waits
    loop:    rests        deliver, take in what came   rests        rests        deliver ...

Why: the two share one interpreter, whose lock torch gives up at every operation and wants back at once. A loop that
handles a message in the middle of a step makes both threads wait for each other dozens of times, which costs more than
the message; and an order takes effect when the step is over anyway.

Invariants:

- the thread waits only for a loop that stood still for it and has something to do, and for at most ``GIVE_WAY_S``;
- the loop rests for at most ``REST_S`` at a time, and not at all while it has long work of its own (``undisturbed``) or
  the thread has nothing to do. In a longer step it is free after that;
- what came while it rested is taken in before the thread goes on, so that it takes effect in the very next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

REST_S = 0.02
"""The longest rest of the loop."""

GIVE_WAY_S = 0.005
"""The longest that the thread waits for the loop's turn to end: as a rule a tenth of it is enough."""

ROUNDS = 1
"""Rounds of the loop between two rests, after the one that takes a step's result: in it sockets are read, and actors
handle what came alone (``bus.prompt``). What came in company waits for the next turn."""


class Turns(Generic[T]):
    """Made on the loop; ``ended`` and ``idle`` are the thread's, the rest is the loop's."""

    def __init__(self, take: Callable[[T], None], news: Callable[[], bool]) -> None:
        """``take`` gets on the loop what the thread hands over, in order. ``news``: asked in the thread, whether
        anything has come that the loop should take in."""
        self._take = take
        self._news = news
        self._loop = asyncio.get_running_loop()
        self._results: SimpleQueue[T | None] = SimpleQueue()
        self._stepping = False  # a step follows the last one, as far as is known
        self._resting = False
        self._in_turn = False
        self._disturbances = 0
        self._over = threading.Lock()  # held while a turn of the loop is due or under way

    # ---- the thread ----------------------------------------------------------------------------------------------

    def ended(self, result: T, *, nothing: bool = False) -> None:
        """Hand over what a step finished, and let a loop that rests have its turn; as a rule another step follows.
        Where it finished ``nothing``, and nothing has come, the loop may go on resting."""
        self._stepping = True
        if nothing and self._resting and not self._news():
            return
        self._over.acquire(blocking=False)  # the last turn's end says nothing of this one's
        self._results.put(result)
        if self._resting:  # after it was put, or a loop that has just ceased to rest would not hear of it
            self._over.acquire(timeout=GIVE_WAY_S)
        else:
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
        """Let the thread go on and stand still until its step is over, which is what there is to wait for; None where
        that takes too long, or none follows."""
        if self._over.locked():
            self._over.release()
        self._resting = True  # before looking: a thread that becomes idle from now on says so
        if self._disturbances or not self._stepping:
            return None
        try:
            return self._results.get(timeout=REST_S)
        except Empty:
            return None
