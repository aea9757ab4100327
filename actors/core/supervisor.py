"""A supervisor: an actor that starts others, starts them again when they fail, and gives up upward.

    await node.spawn(
        lambda: Supervisor([Supervised("store", make_store), Supervised("index", make_index)], strategy=ALL_FOR_ONE),
        "storage",
        restarts=0,
    )

A child that fails is first restarted in place, as often as its own ``Restarts`` allow (``NEVER`` by default): its ref
stays, and so do the messages that wait for it. When it has failed for good, the supervisor starts it anew under the
same name and ref (``ONE_FOR_ONE``), or stops all children, last one first, and starts all of them anew in order
(``ALL_FOR_ONE``). What waited is refused then.

Invariant: no more starts than the supervisor's own ``Restarts`` allow. After that it fails itself, which is its own
supervisor's business, or that of the node's owner (``Node.on_give_up``). A child that was stopped on purpose stays so.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from actors.core.actor import Actor, handler
from actors.core.mailbox import MAILBOX_BOUND
from actors.core.ref import Ref
from actors.core.restarts import NEVER, Budget, Restarts
from actors.core.watching import Down, Monitor

log = logging.getLogger(__name__)

INTENSITY = Restarts(at_most=3, within_s=60.0, first_wait_s=0.0)


class Strategy(enum.Enum):
    """Who is started anew when one child has failed."""

    ONE_FOR_ONE = enum.auto()
    ALL_FOR_ONE = enum.auto()


ONE_FOR_ONE, ALL_FOR_ONE = Strategy.ONE_FOR_ONE, Strategy.ALL_FOR_ONE


class GaveUp(RuntimeError):
    """A supervisor's children fail more often than they may; the message has the last reason."""


@dataclass(frozen=True)
class Supervised:
    """What a supervisor starts."""

    name: str
    factory: Callable[[], Actor]
    restarts: Restarts = NEVER  # in place
    bound: int = MAILBOX_BOUND


class StartAgain(msgspec.Struct, frozen=True):
    """A supervisor's note to itself: the wait before a start is over."""

    names: list[str]


class Supervisor(Actor):
    """See the module docstring."""

    def __init__(
        self, children: Sequence[Supervised], *, strategy: Strategy = ONE_FOR_ONE, restarts: Restarts = INTENSITY
    ) -> None:
        self._children = {child.name: child for child in children}
        if len(self._children) < len(children):
            raise ValueError(f"children with one name twice: {[child.name for child in children]}")
        self._strategy = strategy
        self._budget = Budget(restarts)
        self._running: dict[str, tuple[Ref, Monitor]] = {}
        self._stopped: set[str] = set()  # on purpose

    async def on_start(self) -> None:
        for name in self._children:
            await self._start(name)

    async def on_stop(self) -> None:
        await self._stop(list(self._children))

    async def _start(self, name: str) -> None:
        """Raises what the child's start raises."""
        child = self._children[name]
        ref = await self.node.spawn(child.factory, name, bound=child.bound, restarts=child.restarts, supervised=True)
        self._running[name] = ref, self.monitor(ref)

    async def _stop(self, names: list[str]) -> None:
        for name in reversed(names):
            if name in self._running:
                ref, monitor = self._running.pop(name)
                monitor.cancel()
                await self.node.stop(ref)

    @handler
    async def down(self, message: Down) -> None:
        """A child has ended."""
        name = message.ref.actor
        if self._running.get(name, (None, None))[0] != message.ref:
            return
        del self._running[name]
        if message.kind == "stopped":
            self._stopped.add(name)
        else:
            await self._failed(name, f"{message.ref}: {message.reason}")

    async def _failed(self, name: str, reason: str) -> None:
        """Raises ``GaveUp``."""
        wait_s = self._budget.spend(asyncio.get_running_loop().time())
        if wait_s is None:
            raise GaveUp(f"{self.ref} has started its children anew as often as it may; last, {reason}")
        names = [name] if self._strategy is ONE_FOR_ONE else [n for n in self._children if n not in self._stopped]
        log.warning("%s: %s; starting %s anew", self.ref, reason, ", ".join(names))
        await self._stop(names)
        if wait_s:
            self.send_after(wait_s, StartAgain(names))
        else:
            await self._again(names)

    @handler
    async def again(self, message: StartAgain) -> None:
        await self._again(message.names)

    async def _again(self, names: list[str]) -> None:
        for name in names:
            if name in self._running or name in self._stopped:
                continue
            try:
                await self._start(name)
            except Exception as error:  # user code: a start that fails is another failure
                await self._failed(name, f"{name} did not start: {error!r}")
                return
