"""Names that stand for actors, wherever they live now.

Invariant: a message to a name takes effect at most once, also across a move. It is sent to another place only where the
first one certainly did not begin it (``NotBegun``: no such actor, or one that had stopped before). Where that is not
certain (the node was lost or has restarted, the actor stopped in the middle, the deadline passed) the asker is told,
and decides; its next message goes to the new place.

What a name stands for is kept until the end of that actor is heard of (a monitor), or a message to it fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from actors.core.directory import Directory
from actors.core.ref import Ref
from actors.core.watching import Down, Monitor
from bus.message import BusError, DeadlineExceeded, NoSuchActor, NotBegun, PeerLost

if TYPE_CHECKING:
    from actors.core.node import Node

T = TypeVar("T")
Tell = Callable[[Ref, Any], None]
"""Puts a message on its way to whom its name turned out to stand for."""

FIRST_WAIT_S = 0.02
LONGEST_WAIT_S = 1.0
"""Between two looks for an actor that is not where it was announced, or not announced: it may be moving."""

TELL_WITHIN_S = 5.0
"""A tell to a name that stands for nothing is a dead letter after this long."""


class Named(msgspec.Struct, frozen=True):
    """Fit to travel in messages; ``Node.ask``, ``stream`` and ``tell`` take it as they take a ``Ref``."""

    name: str

    def __str__(self) -> str:
        return f"{self.name!r}"


class Names:
    """One node's view of the directory."""

    def __init__(self, node: Node, directory: Directory | None) -> None:
        self._node = node
        self._directory = directory
        self._known: dict[str, tuple[Ref, Monitor]] = {}
        self._waiting: dict[str, list[tuple[Any, Tell]]] = {}  # tells to names that are being looked up, in order

    @property
    def has_directory(self) -> bool:
        return self._directory is not None

    @property
    def directory(self) -> Directory:
        if self._directory is None:
            raise ValueError(f"node {self._node.address.name} was given no directory: Node(..., directory=...)")
        return self._directory

    async def find(self, name: str, timeout_s: float) -> Ref:
        """What a name stands for, once it stands for something. Raises ``DirectoryError``, ``NoSuchActor``."""
        known = self._known.get(name)
        if known is not None:
            return known[0]
        until, wait_s = self._node.loop.time() + timeout_s, FIRST_WAIT_S
        while (ref := await self.directory.find(name)) is None:
            if self._node.loop.time() + wait_s > until:
                raise NoSuchActor(f"nobody announced {name!r} within {timeout_s:g} s")
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        self.forget(name)

        def ended(down: Down) -> None:
            self.forget(name, ref)

        self._known[name] = ref, self._node.watches.add(ref, ended)
        return ref

    def forget(self, name: str, ref: Ref | None = None) -> None:
        """Look it up again next time, if it is (still) thought to stand for this ref."""
        known = self._known.get(name)
        if known is not None and ref in (None, known[0]):
            del self._known[name]
            known[1].cancel()

    async def ask(self, named: Named, timeout_s: float, ask: Callable[[Ref, float], Awaitable[T]]) -> T:
        """``ask`` where the actor is, within what is left of the time. Raises what that raises."""
        until, wait_s = self._node.loop.time() + timeout_s, FIRST_WAIT_S
        while True:
            ref = await self.find(named.name, until - self._node.loop.time())
            try:
                return await ask(ref, until - self._node.loop.time())
            except NotBegun:
                self.forget(named.name, ref)
                if self._node.loop.time() + wait_s > until:
                    raise
            except (PeerLost, NoSuchActor, DeadlineExceeded):
                self.forget(named.name, ref)
                raise
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def tell(self, named: Named, message: Any, tell: Tell) -> None:
        """In order; at once where it is known who is meant. Raises ``ValueError`` without a directory."""
        if (known := self._known.get(named.name)) is not None and named.name not in self._waiting:
            tell(known[0], message)
            return
        if named.name not in self._waiting:
            _ = self.directory  # raises where there is none
            self._waiting[named.name] = []
            self._node.background(self._tell_later(named))
        context = copy_context()  # whoever tells later does so for who tells now: under the same trace
        self._waiting[named.name].append((message, lambda ref, message: context.run(tell, ref, message)))

    async def _tell_later(self, named: Named) -> None:
        try:
            ref = await self.find(named.name, TELL_WITHIN_S)
        except BusError as error:
            self._give_up(named.name, error)
            return
        for message, tell in self._waiting.pop(named.name):
            try:
                tell(ref, message)
            except (TypeError, ValueError) as error:  # it cannot travel; those behind it can
                self._node.dead_letter(str(named), message, BusError(str(error)))

    def _give_up(self, name: str, error: BusError) -> None:
        for message, _ in self._waiting.pop(name):
            self._node.dead_letter(str(Named(name)), message, error)

    def close(self) -> None:
        """Nothing is looked up any more."""
        for name in list(self._waiting):
            self._give_up(name, BusError(f"node {self._node.address.name} closed before it was found"))
