"""Runs a plan on the simulated network, with real nodes and actors, and writes down what happens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from actors.core import Actor, Node, Ref, handler
from bus.codec import Frame
from bus.message import BusError, Header, Lane, RemoteError
from bus.message import Kind as WireKind
from bus.simulated import Link, SimulatedNetwork, SimulatedTransport
from bus.virtual_time import run as run_in_virtual_time
from tests.bus import plans
from tests.bus.history import (
    AnyEvent,
    Down,
    Dropped,
    Ended,
    Finished,
    Handled,
    History,
    Kind,
    Life,
    Lost,
    Sent,
    Taken,
    Up,
    Yielded,
)

LATENCY_S = 0.0002
LONGEST_S = 60.0
"""Virtual time after which every call has ended."""

ACTOR = "worker"


class Deliberate(Exception):
    """What a handler raises that is to fail."""


class Note(msgspec.Struct, frozen=True):
    op: int
    by: Life


class Work(msgspec.Struct, frozen=True):
    op: int
    by: Life
    fails: bool


class SlowWork(msgspec.Struct, frozen=True):
    op: int
    by: Life
    fails: bool
    delay_s: float


class Count(msgspec.Struct, frozen=True):
    op: int
    by: Life
    items: int


class Done(msgspec.Struct, frozen=True):
    op: int
    life: Life


class Item(msgspec.Struct, frozen=True):
    op: int
    index: int


class Book:
    """The history that is being written."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.killed: set[Life] = set()
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        return self._loop.time()

    def write(self, event: AnyEvent) -> None:
        """What a killed process still does in this one is not part of history."""
        if event.life not in self.killed:
            self.events.append(event)


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
        if message.fails:
            raise Deliberate
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


class Post:
    """One incarnation of a node."""

    def __init__(self, book: Book, network: SimulatedNetwork, name: str, *, port: int = 0) -> None:
        self.transport: SimulatedTransport = network.join(name, port=port)
        self.node = Node(name, transport=self.transport)
        self.life = Life(name, self.node.address.epoch)
        self.ref = Ref(self.node.address, ACTOR)
        self.up = True
        book.write(Up(at=book.now(), life=self.life))

    async def staff(self, book: Book) -> None:
        await self.node.spawn(lambda: Worker(book, self.life), ACTOR)


class Stage:
    """The nodes of one history, through all their incarnations."""

    def __init__(self, plan: plans.Plan, book: Book) -> None:
        weather = plan.weather
        link = Link(
            latency_s=LATENCY_S,
            jitter_s=weather.jitter_s,
            loss=weather.loss,
            duplication=weather.duplication,
            reordering=weather.reordering,
        )
        self.book = book
        self.network = SimulatedNetwork(seed=plan.seed, link=link, on_lost=self._on_lost)
        self.posts: list[list[Post]] = []
        self.over_at = 0.0
        self._ops = 0
        self._calls: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        for number in range(plans.NODES):
            post = Post(self.book, self.network, f"n{number}")
            self.posts.append([post])
            await post.staff(self.book)

    def _on_lost(self, why: str, source: str, frames: Any) -> None:
        op = _op_of(frames)
        if op:
            life = next(event.life for event in self.book.events if isinstance(event, Sent) and event.op == op)
            self.book.write(Dropped(at=self.book.now(), life=life, op=op))

    # ---- steps ---------------------------------------------------------------------------------------------------

    async def take(self, step: plans.Step) -> None:
        match step:
            case plans.Wait():
                await asyncio.sleep(step.seconds)
            case plans.Tell() | plans.Ask() | plans.Stream():
                self._call(step)
            case plans.End():
                await self._end(step)
            case plans.Part():
                others = {f"n{number}" for number in range(plans.NODES) if number != step.node}
                self.network.partition({f"n{step.node}"}, others, cut=step.cut)
            case plans.Heal():
                self.network.heal()
            case plans.Cut():
                self.network.cut(f"n{step.source}", f"n{step.target}")
            case plans.Lose():
                self._lose(step)
            case plans.Watch():
                self._watch(step)

    def _now(self, number: int) -> Post:
        return self.posts[number][-1]

    async def _end(self, step: plans.End) -> None:
        post = self._now(step.node)
        if post.up:
            post.up = False
            self.book.write(Down(at=self.book.now(), life=post.life, killed=step.killed))
            if step.killed:
                self.book.killed.add(post.life)
                post.transport.crash()
            await post.node.close()
        if step.again:
            port = int(post.node.address.control.rsplit(":", 1)[1]) if step.same_place else 0
            successor = Post(self.book, self.network, post.life.node, port=port)
            self.posts[step.node].append(successor)
            await successor.staff(self.book)
            self._greet(successor)

    def _greet(self, newcomer: Post) -> None:
        """As a restarted process does that takes up its work: so the others hear of it."""
        for posts in self.posts:
            if posts[-1].up and posts[-1] is not newcomer:
                self._tell(newcomer, posts[-1].ref, plans.Tell(0, 0, lane=0, whom="newest"))

    def _lose(self, step: plans.Lose) -> None:
        source, target = self._now(step.source), self._now(step.target)
        if source.up and source is not target:
            self.book.write(Lost(at=self.book.now(), life=source.life, other=target.life))
            source.node.lose(target.node.address, "so the plan says")

    def _watch(self, step: plans.Watch) -> None:
        source, target = self._now(step.source), self._now(step.target)
        if source.up and source is not target:

            def on_lost(why: str) -> None:
                self.book.write(Lost(at=self.book.now(), life=source.life, other=target.life))

            source.node.watch(target.node.address, silence_s=step.silence_s, on_lost=on_lost)

    # ---- calls ---------------------------------------------------------------------------------------------------

    def _call(self, step: plans.Tell | plans.Ask | plans.Stream) -> None:
        source = self._now(step.source)
        if not source.up or step.source == step.target:
            return
        target = self.posts[step.target][0 if step.whom == "first" else -1].ref
        if step.whom == "any":
            target = Ref(msgspec.structs.replace(target.node, epoch=0), ACTOR)
        if step.whom == "nobody":
            target = Ref(target.node, "nobody")
        match step:
            case plans.Tell():
                for _ in range(step.count):
                    self._tell(source, target, step)
            case plans.Ask():
                self._calls.append(asyncio.create_task(self._ask(source, target, step)))
            case plans.Stream():
                self._calls.append(asyncio.create_task(self._stream(source, target, step)))

    def _sent(self, source: Post, to: Ref, kind: Kind, lane: int, **facts: Any) -> int:
        self._ops += 1
        node = to.node
        self.book.write(
            Sent(
                at=self.book.now(),
                life=source.life,
                op=self._ops,
                kind=kind,
                to=node.name,
                epoch=node.epoch,
                lane=lane,
                vanished=to.actor != ACTOR,
                **facts,
            )
        )
        return self._ops

    def _tell(self, source: Post, to: Ref, step: plans.Tell) -> None:
        op = self._sent(source, to, "tell", step.lane)
        before = source.node.counters["dead_letters"]
        source.node.tell(to, Note(op, source.life), lane=Lane(step.lane))
        if source.node.counters["dead_letters"] > before:
            self.book.write(Dropped(at=self.book.now(), life=source.life, op=op))

    async def _ask(self, source: Post, to: Ref, step: plans.Ask) -> None:
        slow = step.delay_s > 0
        op = self._sent(
            source,
            to,
            "ask",
            step.lane,
            retries=step.retries,
            timeout_s=step.timeout_s,
            fails=step.fails,
            late=step.delay_s >= step.timeout_s,
            in_turn=not slow,
        )
        life, fails = source.life, step.fails
        message = SlowWork(op, life, fails, step.delay_s) if slow else Work(op, life, fails)
        asking = source.node.ask(
            to, message, Done, timeout_s=step.timeout_s, retries=step.retries, lane=Lane(step.lane)
        )
        try:
            async with asyncio.timeout(step.leave_s or None):
                done = await asking
        except TimeoutError:
            self._ended(source, op, "left")
        except BusError as error:
            self._ended(source, op, type(error).__name__, remote=getattr(error, "kind", ""))
        else:
            self._ended(source, op, "reply", answered=done.life, about=done.op)

    async def _stream(self, source: Post, to: Ref, step: plans.Stream) -> None:
        op = self._sent(source, to, "stream", step.lane, timeout_s=step.timeout_s, items=step.items, in_turn=False)
        message = Count(op, source.life, step.items)
        items = source.node.stream(to, message, Item, timeout_s=step.timeout_s, lane=Lane(step.lane))
        how = "end"
        try:
            async with aclosing(items):
                taken = 0
                async for item in items:
                    index = item.index if item.op == op else -1
                    self.book.write(Taken(at=self.book.now(), life=source.life, op=op, index=index))
                    taken += 1
                    if taken == step.leave:
                        how = "left"
                        break
                    await asyncio.sleep(step.pace_s)
        except BusError as error:
            remote = error.kind if isinstance(error, RemoteError) else ""
            self._ended(source, op, type(error).__name__, remote=remote)
        else:
            self._ended(source, op, how)

    def _ended(self, source: Post, op: int, how: str, **facts: Any) -> None:
        self.book.write(Ended(at=self.book.now(), life=source.life, op=op, how=how, **facts))

    # ---- the end -------------------------------------------------------------------------------------------------

    async def end(self) -> list[str]:
        """Let everything come to its end, close, and say what is left over."""
        self.network.heal()
        if self._calls:
            _, stuck = await asyncio.wait(self._calls, timeout=LONGEST_S)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)
        await asyncio.sleep(LONGEST_S)
        self.over_at = self.book.now()
        for posts in self.posts:
            if posts[-1].up:
                self.book.write(Down(at=self.book.now(), life=posts[-1].life, killed=False))
                await posts[-1].node.close()
        await asyncio.sleep(1)
        left = [
            f"{post.life}: {count} {what}"
            for posts in self.posts
            for post in posts
            for what, count in post.node.describe()["unfinished"].items()
            if count
        ]
        errors = [task.exception() for task in self._calls if not task.cancelled()]
        left += [f"a call raised {error!r}" for error in errors if error is not None]
        return left + [repr(task) for task in asyncio.all_tasks() - {asyncio.current_task()}]


def _op_of(frames: list[Frame]) -> int:
    """Which call a request on the wire belongs to; 0 for what is none."""
    header = msgspec.msgpack.decode(frames[0], type=Header)
    if header.kind not in (WireKind.TELL, WireKind.ASK, WireKind.STREAM):
        return 0
    return int(msgspec.msgpack.decode(frames[1])["op"])


async def _history(plan: plans.Plan) -> History:
    problems: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(repr(context)))
    book = Book()
    stage = Stage(plan, book)
    await stage.begin()
    for step in plan.steps:
        await stage.take(step)
    left = await stage.end()
    return History(book.events, orderly=plan.orderly, calm=plan.calm, left_over=left + problems, over_at=stage.over_at)


def play(plan: plans.Plan) -> History:
    """The history of a plan."""
    logging.disable(logging.CRITICAL)
    try:
        return run_in_virtual_time(_history(plan), seed=plan.seed, limit_s=86_400)
    finally:
        logging.disable(logging.NOTSET)
