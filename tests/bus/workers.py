"""Actors and callers that write down what they do, on whatever network their nodes are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
import numpy as np

from actors.core import Actor, Named, Node, Ref, handler
from actors.core.mailbox import MAILBOX_BOUND
from actors.core.watching import Down as DownMessage
from actors.core.watching import Monitor
from bus.message import BusError, Lane, NodeAddress, NoSuchActor, Overloaded, RemoteError
from bus.objects import Object
from tests.bus import plans
from tests.bus.history import (
    AnyEvent,
    Dropped,
    Ended,
    Finished,
    Handled,
    Kind,
    Life,
    Lost,
    Refused,
    Sent,
    Staffed,
    Taken,
    Told,
    Unwatched,
    Watched,
    Yielded,
)

ACTOR = "worker"

FETCH_S = 30.0
"""Longer than any asker waits: its cancellation comes first."""


def public_name(node: str) -> str:
    """Under which a node's actor is announced."""
    return f"worker of {node}"


def load(op: int, kilobytes: int) -> np.ndarray:
    """What goes with a call, and can be told from what goes with others."""
    return np.arange(op % 251, op % 251 + 128 * kilobytes, dtype=np.int64)


class Book(Protocol):
    """A history that is being written."""

    def now(self) -> float:
        """Seconds on the one clock of all nodes."""

    def write(self, event: AnyEvent) -> None: ...

    def next_op(self) -> int:
        """A number that no other call has."""


class Deliberate(Exception):
    """What a handler raises that is to fail."""


class Spoilt(Exception):
    """An array did not arrive as it was sent."""


class Note(msgspec.Struct, frozen=True):
    op: int
    by: Life


class Work(msgspec.Struct, frozen=True):
    op: int
    by: Life
    fails: bool
    delay_s: float


class SlowWork(msgspec.Struct, frozen=True):
    op: int
    by: Life
    fails: bool
    delay_s: float


class Count(msgspec.Struct, frozen=True):
    op: int
    by: Life
    items: int


class Load(msgspec.Struct, frozen=True):
    op: int
    by: Life
    array: np.ndarray


class Parcel(msgspec.Struct, frozen=True):
    array: np.ndarray


class Fetch(msgspec.Struct, frozen=True):
    op: int
    by: Life
    kilobytes: int
    parcel: Object[Parcel]


class Done(msgspec.Struct, frozen=True):
    op: int
    life: Life


class Item(msgspec.Struct, frozen=True):
    op: int
    index: int


class Worker(Actor):
    """Does what it is told, and writes it down."""

    def __init__(self, book: Book, life: Life) -> None:
        self._book = book
        self._life = life

    def _handled(self, op: int, by: Life) -> None:
        self._book.write(Handled(at=self._book.now(), life=self._life, op=op, by=by))

    @handler
    async def note(self, message: Note) -> None:
        self._handled(message.op, message.by)

    @handler
    async def work(self, message: Work) -> Done:
        self._handled(message.op, message.by)
        if message.delay_s:
            await asyncio.sleep(message.delay_s)
        if message.fails:
            raise Deliberate
        return Done(message.op, self._life)

    @handler
    async def load(self, message: Load) -> Done:
        self._handled(message.op, message.by)
        if not np.array_equal(message.array, load(message.op, message.array.nbytes >> 10)):
            raise Spoilt
        return Done(message.op, self._life)

    @handler(concurrent=True)
    async def fetch(self, message: Fetch) -> Done:
        self._handled(message.op, message.by)
        parcel = await self.node.get(message.parcel, Parcel, timeout_s=FETCH_S)
        if not np.array_equal(parcel.array, load(message.op, message.kilobytes)):
            raise Spoilt
        return Done(message.op, self._life)

    @handler(concurrent=True)
    async def slow_work(self, message: SlowWork) -> Done:
        self._handled(message.op, message.by)
        await asyncio.sleep(message.delay_s)
        if message.fails:
            raise Deliberate
        return Done(message.op, self._life)

    @handler
    async def count(self, message: Count) -> AsyncGenerator[Item, None]:
        self._handled(message.op, message.by)
        try:
            for index in range(message.items):
                yield Item(message.op, index)
                self._book.write(Yielded(at=self._book.now(), life=self._life, op=message.op, index=index))
        finally:
            self._book.write(Finished(at=self._book.now(), life=self._life, op=message.op))


class Caller:
    """One incarnation of a node, from which calls are made."""

    def __init__(self, book: Book, node: Node) -> None:
        self.node = node
        self.life = Life(node.address.name, node.address.epoch)
        self.ref = Ref(node.address, ACTOR)
        self.calls: list[asyncio.Task[None]] = []
        self._monitors: dict[int, Monitor] = {}
        self._book = book
        self._note_losses()
        self._note_refusals()

    def _note_losses(self) -> None:
        """Whatever this node takes another one for lost for is to be noted; that it took leave is noted there."""
        courier = self.node._courier
        lose = courier.lose

        def noted(address: NodeAddress, reason: str) -> None:
            if reason != "it has closed":
                self._book.write(Lost(at=self._book.now(), life=self.life, other=Life(address.name, address.epoch)))
            lose(address, reason)

        setattr(courier, "lose", noted)  # noqa: B010 (mypy: to assign it is no method)

    async def staff(self, *, bound: int = MAILBOX_BOUND) -> None:
        await self.node.spawn(lambda: Worker(self._book, self.life), ACTOR, bound=bound)
        self._book.write(Staffed(at=self._book.now(), life=self.life))

    def _note_refusals(self) -> None:
        """That there was no room for a tell, or nobody to take it, is known to its node alone."""
        dead_letter = self.node.dead_letter

        def noted(to: str, message: Any, error: BusError, *, sender: str = "") -> None:
            if message == Note.__name__ and isinstance(error, Overloaded | NoSuchActor):
                self._book.write(Refused(at=self._book.now(), life=self.life))
            dead_letter(to, message, error, sender=sender)

        setattr(self.node, "dead_letter", noted)  # noqa: B010 (mypy: to assign it is no method)

    def call(self, step: plans.Tell | plans.Ask | plans.Stream | plans.Monitor, target: NodeAddress) -> None:
        if step.whom in ("any", "named"):
            target = msgspec.structs.replace(target, epoch=0)
        to = Ref(target, "nobody" if step.whom == "nobody" else ACTOR)
        named = Named(public_name(target.name)) if step.whom == "named" else None
        match step:
            case plans.Tell():
                for _ in range(step.count):
                    self.tell(to, step, named)
            case plans.Ask():
                self.calls.append(asyncio.create_task(self.ask(to, step, named)))
            case plans.Stream():
                self.calls.append(asyncio.create_task(self.stream(to, step, named)))
            case plans.Monitor():
                self.calls.append(asyncio.create_task(self.monitor(to, step)))

    def _sent(self, to: Ref, kind: Kind, lane: int, **facts: Any) -> int:
        op = self._book.next_op()
        self._book.write(
            Sent(
                at=self._book.now(),
                life=self.life,
                op=op,
                kind=kind,
                to=to.node.name,
                epoch=to.node.epoch,
                lane=lane,
                vanished=to.actor != ACTOR,
                **facts,
            )
        )
        return op

    def tell(self, to: Ref, step: plans.Tell, named: Named | None) -> None:
        op = self._sent(to, "tell", step.lane, named=named is not None, in_turn=named is None)
        before = self.node.counters["dead_letters"]
        self.node.tell(named or to, Note(op, self.life), lane=Lane(step.lane))
        if self.node.counters["dead_letters"] > before:
            self._book.write(Dropped(at=self._book.now(), life=self.life, op=op))

    async def ask(self, to: Ref, step: plans.Ask, named: Named | None) -> None:
        slow = step.by_handle or (step.delay_s > 0 and not step.blocking)
        op = self._sent(
            to,
            "ask",
            step.lane,
            retries=step.retries,
            timeout_s=step.timeout_s,
            fails=step.fails,
            late=step.delay_s >= step.timeout_s,
            in_turn=not slow and named is None,
            named=named is not None,
            lends=step.by_handle,
        )
        asking = self._asking(named or to, op, step, slow=slow)
        try:
            async with asyncio.timeout(step.leave_s or None):
                done = await asking
        except TimeoutError:
            self._ended(op, "left")
        except BusError as error:
            self._failed(op, error)
        else:
            self._ended(op, "reply", answered=done.life, about=done.op)

    async def _asking(self, to: Ref | Named, op: int, step: plans.Ask, *, slow: bool) -> Done:
        async def ask(message: msgspec.Struct) -> Done:
            lane = Lane(step.lane)
            return await self.node.ask(to, message, Done, timeout_s=step.timeout_s, retries=step.retries, lane=lane)

        if not step.by_handle:
            return await ask(self._request(op, step, slow=slow))
        async with self.node.putting(Parcel(load(op, step.kilobytes))) as parcel:
            return await ask(Fetch(op, self.life, step.kilobytes, parcel))

    def _request(self, op: int, step: plans.Ask, *, slow: bool) -> msgspec.Struct:
        if step.kilobytes:
            return Load(op, self.life, load(op, step.kilobytes))
        return (SlowWork if slow else Work)(op, self.life, step.fails, step.delay_s)

    async def stream(self, to: Ref, step: plans.Stream, named: Named | None) -> None:
        op = self._sent(
            to, "stream", step.lane, timeout_s=step.timeout_s, items=step.items, in_turn=False, named=named is not None
        )
        message = Count(op, self.life, step.items)
        items = self.node.stream(named or to, message, Item, timeout_s=step.timeout_s, lane=Lane(step.lane))
        how = "end"
        try:
            async with aclosing(items):
                taken = 0
                async for item in items:
                    index = item.index if item.op == op else -1
                    self._book.write(Taken(at=self._book.now(), life=self.life, op=op, index=index))
                    taken += 1
                    if taken == step.leave:
                        how = "left"
                        break
                    await asyncio.sleep(step.pace_s)
        except BusError as error:
            self._failed(op, error)
        else:
            self._ended(op, how)

    async def monitor(self, to: Ref, step: plans.Monitor) -> None:
        watch, node, now = self._book.next_op(), to.node, self._book.now
        gone = to.actor != ACTOR
        self._book.write(Watched(at=now(), life=self.life, watch=watch, to=node.name, epoch=node.epoch, vanished=gone))

        def told(down: DownMessage) -> None:
            self._monitors.pop(watch, None)
            self._book.write(Told(at=now(), life=self.life, watch=watch, kind=down.kind))

        self._monitors[watch] = self.node.monitor(to, told)
        if step.leave_s:
            await asyncio.sleep(step.leave_s)
            self._unwatch(watch)

    def _unwatch(self, watch: int) -> None:
        self._book.write(Unwatched(at=self._book.now(), life=self.life, watch=watch))
        monitor = self._monitors.pop(watch, None)
        if monitor is not None:
            monitor.cancel()

    def let_go(self) -> None:
        """Of whatever it still watches, and of the calls that are over."""
        for watch in list(self._monitors):
            self._unwatch(watch)
        self.calls.clear()

    def _failed(self, op: int, error: BusError) -> None:
        self._ended(op, type(error).__name__, remote=error.kind if isinstance(error, RemoteError) else "")

    def _ended(self, op: int, how: str, **facts: Any) -> None:
        self._book.write(Ended(at=self._book.now(), life=self.life, op=op, how=how, **facts))

    def left_over(self) -> list[str]:
        """What a closed node has not let go of, and calls that raised what they should not."""
        unfinished = self.node.describe()["unfinished"].items()
        return [f"{self.life}: {count} {what}" for what, count in unfinished if count] + self.failures()

    def failures(self) -> list[str]:
        """Calls that raised what they should not."""
        errors = [task.exception() for task in self.calls if task.done() and not task.cancelled()]
        return [f"{self.life}: a call raised {error!r}" for error in errors if error is not None]
