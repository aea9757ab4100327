"""What is asked in the tests of delivery, and who answers it."""

import asyncio
from typing import Any

import msgspec
import numpy as np

from bus.answering import Request
from bus.codec import Decoder
from tests.bus.hands import Hand


class Add(msgspec.Struct):
    amount: int


class Total(msgspec.Struct):
    value: int


class Sum(msgspec.Struct):
    """Looks like ``Total`` on the wire."""

    value: int


class Bytes(msgspec.Struct):
    data: np.ndarray


def ask(source: Hand, target: Hand, *, reply: Any = Total, **options: Any) -> asyncio.Task[Any]:
    """Ask for ``Add(1)``; the request is sent once the loop turns."""
    options.setdefault("timeout_s", 10.0)
    return asyncio.create_task(source.courier.ask(target.address, "counter", Add(1), Decoder(reply), **options))


class Counter:
    """Counts what it handles."""

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, request: Request) -> None:
        self.total += request.decode(Decoder(Add)).amount
        request.reply(Total(self.total))
