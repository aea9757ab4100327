"""What an actor holds beside its messages: monitors, links and timers.

Invariant: they end with the actor that holds them. A restart in place counts as an end for monitors and timers, which
the fresh actor sets anew (in ``on_start``), but not for links, which bind the actor, not its state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from actors.core.envelope import Envelope, Tick
from actors.core.ref import Ref
from actors.core.watching import Down, Monitor
from bus.message import BusError

if TYPE_CHECKING:
    from actors.core.cell import Cell
    from actors.core.node import Node


class Timer:
    """A message to come, or one that comes again and again, until it is cancelled. Idempotent."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel

    def cancel(self) -> None:
        self._cancel()


class Holdings:
    """See the module docstring."""

    def __init__(self, node: Node, cell: Cell) -> None:
        self._node = node
        self._cell = cell
        self._loop = asyncio.get_running_loop()
        self._monitors: set[Monitor] = set()
        self._links: dict[Ref, Monitor] = {}
        self._timers: set[_Clock] = set()

    # ---- other actors --------------------------------------------------------------------------------------------

    def monitor(self, ref: Ref) -> Monitor:
        """See ``Actor.monitor``."""
        facts = self._cell.actor.handlers().get(Down.__name__)
        if facts is None or facts.message is not Down:
            kind = type(self._cell.actor).__name__
            raise TypeError(f"{kind} monitors {ref} and needs a handler for Down to be told of its end")

        def notify(down: Down) -> None:
            self._monitors.discard(outer)
            self._cell.notice(Envelope(facts, down))

        def cancel() -> None:
            self._monitors.discard(outer)
            inner.cancel()

        inner = self._node.watches.add(ref, notify)
        outer = Monitor(ref, cancel)
        self._monitors.add(outer)
        return outer

    def link(self, ref: Ref) -> Monitor:
        """See ``Actor.link``."""
        if ref in self._links:
            return self._links[ref]
        own = self._cell.ref

        def ended(down: Down) -> None:
            self._links.pop(ref, None)
            self._node.end_linked(own, down)

        def cancel() -> None:
            self._links.pop(ref, None)
            inner.cancel()

        inner = self._node.watches.add(ref, ended, link=own)
        self._links[ref] = Monitor(ref, cancel, inner.leave)
        return self._links[ref]

    # ---- timers --------------------------------------------------------------------------------------------------

    def send_after(self, delay_s: float, message: Any) -> Timer:
        """See ``Actor.send_after``."""
        return self._clock(message, delay_s, None)

    def every(self, interval_s: float, message: Any) -> Timer:
        """See ``Actor.every``."""
        if not interval_s > 0:
            raise ValueError(f"{self._cell.ref}: a message every {interval_s} s: expected a time above 0")
        return self._clock(message, interval_s, interval_s)

    def _clock(self, message: Any, delay_s: float, interval_s: float | None) -> Timer:
        facts = self._node.facts_for(self._cell, type(message))
        clock = _Clock(self, Tick(facts, message), self._loop.time() + max(delay_s, 0.0), interval_s)
        self._timers.add(clock)
        clock.wait(self._loop)
        return Timer(lambda: self._stop(clock))

    def _stop(self, clock: _Clock) -> None:
        self._timers.discard(clock)
        clock.cancel()

    def tick(self, clock: _Clock) -> None:
        """A clock's time has come. One whose last message still waits is left out: a slow actor is not buried."""
        if clock.interval_s is None:
            self._timers.discard(clock)
        if clock.tick.waits:
            self._node.counters["ticks_skipped"] += 1
        else:
            try:
                clock.tick.trace = self._node.traces.current()
                self._cell.offer(clock.tick)
                clock.tick.waits = True
            except BusError as error:
                own = str(self._cell.ref)
                self._node.dead_letter(own, clock.tick.message, error, sender=own)
        if clock.interval_s is not None:
            clock.due = max(clock.due + clock.interval_s, self._loop.time())
            clock.wait(self._loop)

    # ---- ends ----------------------------------------------------------------------------------------------------

    def renew(self) -> None:
        """The actor is restarted in place."""
        self.stop_timers()
        for monitor in list(self._monitors):
            monitor.cancel()

    def stop_timers(self) -> None:
        for clock in self._timers:
            clock.cancel()
        self._timers.clear()

    def end(self) -> None:
        """The actor has ended, and who watches it has been told."""
        self.renew()
        for link in list(self._links.values()):
            link.leave()
        self._links.clear()


class _Clock:
    """One timer of an actor."""

    def __init__(self, holdings: Holdings, tick: Tick, due: float, interval_s: float | None) -> None:
        self.tick = tick
        self.due = due
        self.interval_s = interval_s
        self._holdings = holdings
        self._handle: asyncio.TimerHandle | None = None

    def wait(self, loop: asyncio.AbstractEventLoop) -> None:
        self._handle = loop.call_at(self.due, self._holdings.tick, self)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
