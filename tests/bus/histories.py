"""Runs a plan on the simulated network, with real nodes and actors, and writes down what happens."""

from __future__ import annotations

import asyncio
import itertools
import logging

import msgspec

from actors.core import Node
from bus.message import Header
from bus.message import Kind as WireKind
from bus.simulated import Frames, Link, SimulatedNetwork
from bus.virtual_time import run as run_in_virtual_time
from tests.bus import plans
from tests.bus.history import AnyEvent, Down, Dropped, History, Life, Lost, Sent, Up
from tests.bus.workers import Caller

LATENCY_S = 0.0002
LONGEST_S = 60.0
"""Virtual time after which every call has ended."""


class LoopBook:
    """The history of one process in virtual time."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.killed: set[Life] = set()
        self._loop = asyncio.get_running_loop()
        self._ops = itertools.count(1)
        self.senders: dict[int, Life] = {}

    def now(self) -> float:
        return self._loop.time()

    def next_op(self) -> int:
        return next(self._ops)

    def write(self, event: AnyEvent) -> None:
        """What a killed process still does in this one is not part of history."""
        if event.life not in self.killed:
            self.events.append(event)
        if isinstance(event, Sent):
            self.senders[event.op] = event.life


class Post(Caller):
    """One incarnation of a node."""

    def __init__(self, book: LoopBook, network: SimulatedNetwork, name: str, *, port: int = 0) -> None:
        self.transport = network.join(name, port=port)
        super().__init__(book, Node(name, transport=self.transport))
        self.up = True
        book.write(Up(at=book.now(), life=self.life))


class Stage:
    """The nodes of one history, through all their incarnations."""

    def __init__(self, plan: plans.Plan, book: LoopBook) -> None:
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

    async def begin(self) -> None:
        for number in range(plans.NODES):
            post = Post(self.book, self.network, f"n{number}")
            self.posts.append([post])
            await post.staff()

    def _on_lost(self, why: str, source: str, frames: Frames) -> None:
        """What a node drops because it concludes that another is gone needs a better reason than that."""
        op = _op_of(frames)
        if op and why != "disconnected":
            self.book.write(Dropped(at=self.book.now(), life=self.book.senders[op], op=op))

    # ---- steps ---------------------------------------------------------------------------------------------------

    async def take(self, step: plans.Step) -> None:
        match step:
            case plans.Wait():
                await asyncio.sleep(step.seconds)
            case plans.Tell() | plans.Ask() | plans.Stream():
                source = self._now(step.source)
                if source.up and step.source != step.target:
                    source.call(step, self.posts[step.target][0 if step.whom == "first" else -1].node.address)
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
            await successor.staff()
            self._greet(successor)

    def _greet(self, newcomer: Post) -> None:
        """As a restarted process does that takes up its work: so the others hear of it."""
        for posts in self.posts:
            if posts[-1].up and posts[-1] is not newcomer:
                newcomer.call(plans.Tell(0, 0, lane=0, whom="newest"), posts[-1].node.address)

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

    # ---- the end -------------------------------------------------------------------------------------------------

    async def end(self) -> list[str]:
        """Let everything come to its end, close, and say what is left over."""
        everyone = [post for posts in self.posts for post in posts]
        calls = [task for post in everyone for task in post.calls]
        self.network.heal()
        if calls:
            _, stuck = await asyncio.wait(calls, timeout=LONGEST_S)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(LONGEST_S)
        self.over_at = self.book.now()
        for post in everyone:
            if post.up:
                self.book.write(Down(at=self.book.now(), life=post.life, killed=False))
                await post.node.close()
        await asyncio.sleep(1)
        left = [text for post in everyone for text in post.left_over()]
        return left + [repr(task) for task in asyncio.all_tasks() - {asyncio.current_task()}]


def _op_of(frames: Frames) -> int:
    """Which call a request on the wire belongs to; 0 for what is none."""
    header = msgspec.msgpack.decode(frames[0], type=Header)
    if header.kind not in (WireKind.TELL, WireKind.ASK, WireKind.STREAM):
        return 0
    return int(msgspec.msgpack.decode(frames[1])["op"])


async def _history(plan: plans.Plan) -> History:
    problems: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(repr(context)))
    book = LoopBook()
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
