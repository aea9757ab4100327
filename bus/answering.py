"""The answering side of delivery: requests from other nodes, and what was answered to them.

Invariants:

- an ask takes effect at most once, however often it is sent: a repeated one gets the recorded answer, one that its
  asker has given up is dropped. Each ask with retries says which is the oldest that its sender still waits for;
  exactly what is older is forgotten, so that the memory is bounded by what is being asked at a time;
- what its asker no longer waits for, be it given up, cancelled or gone, is cancelled where it has not ended yet, and
  not begun where it has not begun;
- a stream sends no more than its reader granted, and stops when the reader does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec

from bus.asking import WINDOW
from bus.bounds import MESSAGE_OVERHEAD_BYTES, Account, Bounds
from bus.codec import Decoder, Frame
from bus.message import (
    ASK,
    ERROR,
    REPLY,
    STREAM,
    TELL,
    DeadlineExceeded,
    DecodeError,
    Failure,
    Header,
    Kind,
    Lane,
    Overloaded,
)
from bus.refusals import Refusals
from bus.wire import Wire

T = TypeVar("T")

KEPT_ANSWER_BYTES = 1 << 20
"""A larger answer is not recorded: an ask that is repeated after it was lost gets an error that says so."""

LEAST_PATIENCE_S = 1.0
"""A stream waits for credit as long as its reader waits for an item, but at least this long."""


class Request:
    """One arrived TELL, ASK or STREAM, to be answered through its methods (a TELL has no answer)."""

    __slots__ = ("_answering", "account", "alone", "frames", "header", "lane", "on_cancel", "size")

    def __init__(self, answering: Answering, header: Header, frames: Sequence[Frame], lane: Lane, alone: bool) -> None:
        self.header = header
        self.frames = frames
        self.lane = lane
        self.alone = alone  # no other one has come by now: it may be handled at once
        self.on_cancel: Callable[[], None] | None = None  # called once where nobody waits for the answer any more
        self._answering = answering
        self.account: Account | None = None  # of its sender, while it waits there with its ``size``
        self.size = 0

    def taken(self) -> None:
        """It waits no longer: a handler has it, or nobody ever will."""
        account = self.account
        if account is not None:
            self.account = None
            account.messages -= 1
            account.bytes -= self.size

    def __del__(self) -> None:
        if self.account is not None:
            self.taken()

    def decode(self, decoder: Decoder[T]) -> T:
        """The body; raises ``DecodeError``."""
        try:
            return decoder.decode(self.frames)
        except DecodeError:
            self._answering.on_unreadable(self.header)
            raise

    def reply(self, value: Any) -> None:
        """Raises ``TypeError`` for what cannot travel; a reply that cannot be sent is counted."""
        self._answering.answer(self, REPLY, value)

    def fail(self, error: Failure) -> None:
        self._answering.answer(self, ERROR, error)

    async def stream(self, items: AsyncGenerator[Any, None]) -> None:
        """Send every item as the asker grants credit, then the end. Raises ``DeadlineExceeded`` without credit."""
        await self._answering.feed(self, items)


Serve = Callable[[Request], None]
"""What a node does with a request."""


class _Answer(msgspec.Struct, frozen=True):
    kind: Kind
    type: str
    body: list[bytes]
    lane: Lane


class _Book:
    """The repeated asks of one incarnation: id to answer, None while it is worked on."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.oldest = 0
        self.answers: dict[int, _Answer | None] = {}
        self.bytes = 0

    def forget_before(self, oldest: int) -> None:
        """Ids arrive nearly in order: what is out of order is forgotten when it comes to the front."""
        self.oldest = oldest
        while self.answers and (first := next(iter(self.answers))) < oldest:
            self.bytes -= _size(self.answers.pop(first))

    def keep(self, id_: int, answer: _Answer) -> None:
        self.answers[id_] = answer
        self.bytes += _size(answer)


class _Feed:
    """A stream that this node sends."""

    def __init__(self) -> None:
        self.credit = asyncio.Semaphore(WINDOW)
        self.granted = WINDOW  # items in all
        self.task: asyncio.Task[Any] | None = None


_Key = tuple[str, int, int]


class Answering:
    """See the module docstring."""

    def __init__(
        self,
        wire: Wire,
        serve: Serve,
        *,
        bounds: Bounds,
        refusals: Refusals,
        on_unreadable: Callable[[Header], None],
    ) -> None:
        """``on_unreadable``: told of requests whose body is not what it should be."""
        self._wire = wire
        self._serve = serve
        self._bounds = bounds
        self._refusals = refusals
        self.on_unreadable = on_unreadable
        self._accounts: dict[str, Account] = {}
        failure = wire.encode(Failure("DeadlineExceeded", "its asker had given it up"))
        self._given_up = _Answer(Kind.ERROR, "Failure", [bytes(frame) for frame in failure], Lane.CONTROL)
        self._books: dict[str, _Book] = {}
        self._feeds: dict[_Key, _Feed] = {}
        self._asks: dict[_Key, Request] = {}  # that are not answered yet

    # ---- requests ------------------------------------------------------------------------------------------------

    def on_request(self, header: Header, frames: Sequence[Frame], lane: Lane, now: float, alone: bool) -> None:
        kind = header.kind
        if kind is STREAM:
            feed = _Feed()
            if self._feeds.setdefault(_key(header), feed) is not feed:
                self._wire.counters["duplicates"] += 1  # doubled on the way
                return
        elif header.oldest and not self._first_time(header):
            return
        request = Request(self, header, frames, lane, alone)
        if kind is ASK and self._asks.setdefault(_key(header), request) is not request:
            self._wire.counters["duplicates"] += 1  # of one without retries, doubled on the way
            return
        name = header.sender.name
        account = self._accounts.get(name) or self._open_account(name)
        size = MESSAGE_OVERHEAD_BYTES + (len(frames[0]) if len(frames) == 1 else sum(map(len, frames)))
        refusal = account.add(size, now)
        if refusal:
            self._refuse(request, refusal)
            return
        request.account, request.size = account, size
        self._serve(request)

    def _open_account(self, name: str) -> Account:
        if len(self._accounts) >= self._bounds.peers:  # of nodes that went while something of theirs waited
            self._accounts = {name: account for name, account in self._accounts.items() if account.messages}
        account = self._accounts[name] = Account(self._bounds)
        return account

    def _refuse(self, request: Request, refusal: str) -> None:
        sender, this = request.header.sender.name, self._wire.address.name
        self._refusals.note("over_bounds", f"messages of node {sender}: {refusal}")
        self.answer(request, Kind.ERROR, Failure(Overloaded.__name__, f"node {this} refuses it: {refusal}"))

    def _first_time(self, header: Header) -> bool:
        """Note an ask with retries; one that came before is answered or dropped here."""
        sender = header.sender
        book = self._books.get(sender.name)
        if book is None or book.epoch != sender.epoch:
            book = self._books[sender.name] = _Book(sender.epoch)
        if header.id < book.oldest:
            self._wire.counters["given_up"] += 1
            return False
        if header.id in book.answers:
            self._wire.counters["duplicates"] += 1
            answer = book.answers[header.id]
            if answer is not None:
                self._wire.try_send(
                    answer.kind, sender, answer.lane, body=answer.body, type_=answer.type, id_=header.id
                )
            return False
        if header.oldest > book.oldest:
            book.forget_before(header.oldest)
        if len(book.answers) >= self._bounds.kept_answers:
            refusal = f"it waits for {self._bounds.kept_answers} asks with retries already"
            self._refusals.note("over_bounds", f"messages of node {sender.name}: {refusal}")
            failure = self._wire.encode(Failure(Overloaded.__name__, refusal))
            self._wire.try_send(Kind.ERROR, sender, Lane.CONTROL, body=failure, type_="Failure", id_=header.id)
            return False
        book.answers[header.id] = None
        return True

    def answer(self, request: Request, kind: Kind, value: Any) -> None:
        """Send the answer to an ask or stream, and record it where it may be asked again."""
        header = request.header
        if header.kind is TELL:
            return
        body = self._wire.encode(value)
        type_ = type(value).__name__
        if header.kind is STREAM:
            self._feeds.pop(_key(header), None)
        elif self._asks.pop(_key(header), None) is not request:
            return  # cancelled: what came of it is nobody's answer
        request.on_cancel = None
        book = self._books.get(header.sender.name)
        if book is not None and book.epoch == header.sender.epoch and header.id in book.answers:
            book.keep(header.id, self._recorded(kind, type_, body, request.lane, book.bytes))
        self._wire.try_send(kind, header.sender, request.lane, body=body, type_=type_, id_=header.id)

    def _recorded(self, kind: Kind, type_: str, body: Sequence[Frame], lane: Lane, kept: int) -> _Answer:
        """A private copy of an answer: the frames are views of what its actor may change."""
        size = sum(len(frame) for frame in body)
        if size <= KEPT_ANSWER_BYTES and kept + size <= self._bounds.kept_bytes:
            return _Answer(kind, type_, [bytes(frame) for frame in body], lane)
        why = "is too large to be kept" if size > KEPT_ANSWER_BYTES else "too much was kept already"
        text = f"it was handled, but its answer of {size} bytes got lost and {why}"
        failure = self._wire.encode(Failure("AnswerLost", text))
        return _Answer(Kind.ERROR, "Failure", [bytes(frame) for frame in failure], lane)

    # ---- streams -------------------------------------------------------------------------------------------------

    async def feed(self, request: Request, items: AsyncGenerator[Any, None]) -> None:
        """See ``Request.stream``."""
        header, key = request.header, _key(request.header)
        feed = self._feeds.get(key)
        if feed is None:  # cancelled before it began
            return
        feed.task = asyncio.current_task()
        sequence = 0
        try:
            async with aclosing(items):
                async for item in items:
                    await self._credit(feed, header)
                    self._item(request, Kind.ITEM, sequence, self._wire.encode(item), type(item).__name__)
                    sequence += 1
            self._item(request, Kind.END, sequence)
        finally:
            self._feeds.pop(key, None)

    async def _credit(self, feed: _Feed, header: Header) -> None:
        if not feed.credit.locked():
            await feed.credit.acquire()
            return
        patience_s = max(header.budget_s, LEAST_PATIENCE_S)
        try:
            async with asyncio.timeout(patience_s):
                await feed.credit.acquire()
        except TimeoutError:
            self._wire.counters["streams_abandoned"] += 1
            who = f"{self._wire.address.name} waited for {header.sender.name} to read on"
            raise DeadlineExceeded(f"{who}: no credit within {patience_s:g} s") from None

    def _item(self, request: Request, kind: Kind, sequence: int, body: Sequence[Frame] = (), type_: str = "") -> None:
        header = request.header
        self._wire.send(kind, header.sender, request.lane, body=body, type_=type_, id_=header.id, sequence=sequence)

    def on_credit(self, header: Header) -> None:
        feed = self._feeds.get(_key(header))
        if feed is None:
            return
        more = min(header.sequence - feed.granted, WINDOW)
        if more > 0:
            feed.granted += more
            for _ in range(more):
                feed.credit.release()

    def on_cancel(self, header: Header) -> None:
        key = _key(header)
        if key in self._asks:
            self._cancel(key)
        else:
            self._end(lambda feed: feed == key)

    def _cancel(self, key: _Key) -> None:
        request = self._asks.pop(key)
        self._wire.counters["cancelled"] += 1
        book = self._books.get(key[0])
        if book is not None and book.epoch == key[1] and key[2] in book.answers:
            book.keep(key[2], self._given_up)  # one that is repeated late must not begin again
        on_cancel, request.on_cancel = request.on_cancel, None
        if on_cancel is not None:
            on_cancel()

    def _end(self, ended: Callable[[_Key], bool]) -> None:
        for key in [key for key in self._feeds if ended(key)]:
            feed = self._feeds.pop(key)
            if feed.task is not None:
                feed.task.cancel()

    # ---- ends ----------------------------------------------------------------------------------------------------

    def forget(self, name: str, epoch: int) -> None:
        """An incarnation, and all before it, will read no more answers."""
        book = self._books.get(name)
        if book is not None and book.epoch <= epoch:
            del self._books[name]
        for key in [key for key in self._asks if key[0] == name and key[1] <= epoch]:
            self._cancel(key)
        account = self._accounts.get(name)
        if account is not None and account.messages == 0:
            del self._accounts[name]
        self._end(lambda key: key[0] == name and key[1] <= epoch)

    def unfinished(self) -> dict[str, int]:
        """What is being answered, or kept because it may be asked for again."""
        return {"streams_sent": len(self._feeds), "answers": sum(len(book.answers) for book in self._books.values())}

    def close(self) -> None:
        self._end(lambda key: True)
        self._books.clear()


def _size(answer: _Answer | None) -> int:
    return 0 if answer is None else sum(map(len, answer.body))


def _key(header: Header) -> _Key:
    return header.sender.name, header.sender.epoch, header.id
