"""What waits for an answer from another node: an ask, or the reader of a stream."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from bus.codec import Decoder, Frame
from bus.message import Lane, NodeAddress
from bus.prompt import Prompt


class Asked(Prompt[Any]):
    """An ask; awaited for its answer."""

    __slots__ = (
        "about",
        "actor",
        "again",
        "body",
        "deadline",
        "decoder",
        "expired",
        "lane",
        "resend",
        "retries",
        "to",
        "type",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        to: NodeAddress,
        actor: str,
        *,
        type_: str,
        lane: Lane,
        decoder: Decoder[Any],
        body: list[Frame],
        deadline: float,
        retries: int,
        about: str,
    ) -> None:
        Prompt.__init__(self, loop)  # on the way of every ask: without the object that super() would make
        self.to = to
        self.actor = actor
        self.type = type_
        self.lane = lane
        self.decoder = decoder
        self.body = body
        self.deadline = deadline
        self.retries = retries
        self.about = about
        self.again = False  # whether it was sent more than once
        self.expired = False
        self.resend: asyncio.TimerHandle | None = None

    @property
    def what(self) -> str:
        """For people."""
        return f"{self.type} to {self.actor}@{self.to.name}" + (f" ({self.about})" if self.about else "")


class Reading:
    """A stream that this node reads; the credit granted bounds what is queued."""

    __slots__ = ("decoder", "expected", "items", "to", "what")

    def __init__(self, to: NodeAddress, decoder: Decoder[Any], what: str) -> None:
        self.to = to
        self.decoder = decoder
        self.what = what
        self.expected = 0
        self.items: asyncio.Queue[Any] = asyncio.Queue()

    def end(self, error: Exception | None = None) -> None:
        """Behind the items that are there."""
        self.items.put_nowait(End(error))

    async def next(self, timeout_s: float) -> Any:
        """An item or the ``End``. Raises ``TimeoutError``."""
        if not self.items.empty():
            return self.items.get_nowait()
        async with asyncio.timeout(timeout_s):
            return await self.items.get()


class End(msgspec.Struct, frozen=True):
    """Of a stream."""

    error: Exception | None = None
