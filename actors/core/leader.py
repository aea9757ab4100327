"""Who leads, or has a role, wherever that is now: for actors that outlive the one they report to, or ask.

Invariant: what is asked of the leader is asked of one at a time. Where a leader that is gone may or may not have heard
it, its successor is asked again, so whoever handles such an ask must be able to hear it twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from actors.core.ref import Ref
from bus.message import DeadlineExceeded, NoSuchActor, PeerLost

if TYPE_CHECKING:
    from actors.core.exchange import Exchange

T = TypeVar("T")
log = logging.getLogger(__name__)

AGAIN_S = 0.1
"""Before a leader is asked again that has not begun to listen."""


class Successive:
    """Asks of whoever it is just now. ``patience_s``: how much longer than its own time an ask may wait for another;
    with 0 there is none, and an ask of one that is gone fails at once. ``late_s``: the same for one that does not
    answer in time."""

    def __init__(self, *, patience_s: float, late_s: float) -> None:
        self._patience_s = patience_s
        self._late_s = late_s
        self._followed = asyncio.Event()

    async def ask_of(
        self,
        whom: Callable[[], Ref | None],
        node: Exchange,
        message: Any,
        reply: type[T],
        *,
        timeout_s: float,
        retries: int = 0,
        about: str = "",
    ) -> T:
        """``whom``: who it is now, None for nobody; a change is told with ``_followed``. Raises what the last one's
        ``ask`` raised."""
        until = node.loop.time() + timeout_s + self._patience_s
        while True:
            to = whom()
            try:
                if to is None:
                    raise PeerLost(f"nobody is there for {about or type(message).__name__}")
                return await node.ask(to, message, reply, timeout_s=timeout_s, retries=retries, about=about)
            except (PeerLost, NoSuchActor, DeadlineExceeded) as error:
                left_s = until - node.loop.time()
                if isinstance(error, DeadlineExceeded):
                    left_s = min(left_s, self._late_s)
                if self._patience_s == 0 or left_s <= 0:
                    raise
                log.info("%s is said again, to whoever comes next: %s", about or type(message).__name__, error)
                # A successor that is known but does not listen yet is asked again soon.
                await self._another(to, whom, min(left_s, AGAIN_S) if isinstance(error, NoSuchActor) else left_s)
                if whom() == to and not isinstance(error, NoSuchActor):
                    raise

    async def _another(self, than: Ref | None, whom: Callable[[], Ref | None], within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                while whom() == than:
                    self._followed.clear()
                    await self._followed.wait()
        except TimeoutError:
            return


class Leader(Successive):
    """See the module docstring. ``follow`` says who it is from now on; ``late_is_gone``: whether one that does not
    answer in time may have a successor."""

    def __init__(self, ref: Ref, *, patience_s: float = 0.0, late_is_gone: bool = True) -> None:
        super().__init__(patience_s=patience_s, late_s=patience_s if late_is_gone else 0.0)
        self._ref = ref
        self._listeners: list[Callable[[Ref], object]] = []

    @property
    def ref(self) -> Ref:
        return self._ref

    def follow(self, ref: Ref) -> None:
        self._ref = ref
        self._followed.set()
        for listener in self._listeners:
            listener(ref)

    def on_follow(self, listener: Callable[[Ref], object]) -> None:
        """Told whenever somebody else leads."""
        self._listeners.append(listener)

    def tell(self, node: Exchange, message: Any) -> None:
        """At most once, to whoever leads now."""
        node.tell(self._ref, message)

    async def ask(
        self, node: Exchange, message: Any, reply: type[T], *, timeout_s: float, retries: int = 0, about: str = ""
    ) -> T:
        """Raises what the last leader's ``ask`` raised."""
        return await self.ask_of(
            lambda: self._ref, node, message, reply, timeout_s=timeout_s, retries=retries, about=about
        )
