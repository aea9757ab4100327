"""Runs a plan on the simulated network, with real nodes and actors, and writes down what happens."""

from __future__ import annotations

import asyncio
import itertools
import logging

import msgspec

from actors.core import Node
from actors.core.mailbox import MAILBOX_BOUND
from bus.message import Header, Lane
from bus.message import Kind as WireKind
from bus.simulated import Frames, Link, SimulatedNetwork
from bus.virtual_time import run as run_in_virtual_time
from tests.bus import plans
from tests.bus.history import AnyEvent, Down, Dropped, History, Life, Sent, Up
from tests.bus.workers import Caller

LATENCY_S = 0.0002
CROWDED_MAILBOX = 4
CROWDED_CONNECTION = 12
"""Messages that these hold where it is crowded."""

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

    def __init__(self, seed: int, book: LoopBook, nodes: int = plans.NODES, *, crowded: bool = False) -> None:
        queued = dict.fromkeys(Lane, CROWDED_CONNECTION) if crowded else None
        self.book = book
        self.network = SimulatedNetwork(seed=seed, on_lost=self._on_lost, queued=queued)
        self._bound = CROWDED_MAILBOX if crowded else MAILBOX_BOUND
        self.names = [f"n{number}" for number in range(nodes)]
        self.posts: list[list[Post]] = []

    async def begin(self) -> None:
        for number in range(len(self.names)):
            post = Post(self.book, self.network, f"n{number}")
            self.posts.append([post])
            await post.staff(bound=self._bound)

    def change_weather(self, weather: plans.Weather) -> None:
        link = Link(latency_s=LATENCY_S, **msgspec.structs.asdict(weather))
        for source, target in itertools.permutations(self.names, 2):
            self.network.set_link(source, target, link)

    def _on_lost(self, why: str, source: str, frames: Frames) -> None:
        """What a node drops because it concludes that another is gone needs a better reason than that."""
        sender = self.book.senders.get(_op_of(frames))
        if sender is not None and why != "disconnected":
            self.book.write(Dropped(at=self.book.now(), life=sender, op=_op_of(frames)))

    # ---- steps ---------------------------------------------------------------------------------------------------

    async def take(self, step: plans.Step) -> None:
        match step:
            case plans.Wait():
                await asyncio.sleep(step.seconds)
            case plans.Tell() | plans.Ask() | plans.Stream() | plans.Monitor():
                source = self._now(step.source)
                if source.up and step.source != step.target:
                    source.call(step, self.posts[step.target][0 if step.whom == "first" else -1].node.address)
            case plans.End():
                await self._end(step)
            case plans.Part():
                name = self.names[step.node]
                self.network.partition({name}, {*self.names} - {name}, cut=step.cut)
            case plans.Heal():
                self.network.heal()
            case plans.Cut():
                self.network.cut(self.names[step.source], self.names[step.target])
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
            if step.late_s:
                successor.calls.append(asyncio.create_task(self._staff_late(successor, step.late_s)))
            else:
                await successor.staff(bound=self._bound)
            self._greet(successor)

    async def _staff_late(self, post: Post, late_s: float) -> None:
        await asyncio.sleep(late_s)
        if post.up:
            await post.staff(bound=self._bound)

    def _greet(self, newcomer: Post) -> None:
        """As a restarted process does that takes up its work: so the others hear of it."""
        for posts in self.posts:
            if posts[-1].up and posts[-1] is not newcomer:
                newcomer.call(plans.Tell(0, 0, lane=0, whom="newest"), posts[-1].node.address)

    def _lose(self, step: plans.Lose) -> None:
        source, target = self._now(step.source), self._now(step.target)
        if source.up and source is not target:
            source.node.lose(target.node.address, "so the plan says")

    def _watch(self, step: plans.Watch) -> None:
        source, target = self._now(step.source), self._now(step.target)
        if source.up and source is not target:
            source.node.watch(target.node.address, silence_s=step.silence_s, on_lost=lambda why: None)

    # ---- the end -------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Let everything come to its end that anybody waits for."""
        calls = [task for post in self.everyone() for task in post.calls]
        self.network.heal()
        if calls:
            _, stuck = await asyncio.wait(calls, timeout=LONGEST_S)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(LONGEST_S)

    async def close(self) -> list[str]:
        """Say what is left over."""
        for post in self.everyone():
            if post.up:
                self.book.write(Down(at=self.book.now(), life=post.life, killed=False))
                await post.node.close()
        await asyncio.sleep(1)
        left = [text for post in self.everyone() for text in post.left_over()]
        return left + [repr(task) for task in asyncio.all_tasks() - {asyncio.current_task()}]

    def everyone(self) -> list[Post]:
        return [post for posts in self.posts for post in posts]


def _op_of(frames: Frames) -> int:
    """Which call a request on the wire belongs to; 0 for what is none."""
    header = msgspec.msgpack.decode(frames[0], type=Header)
    if header.kind not in (WireKind.TELL, WireKind.ASK, WireKind.STREAM):
        return 0
    return int(msgspec.msgpack.decode(frames[1]).get("op", 0))


async def _history(plan: plans.Plan) -> History:
    problems: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(repr(context)))
    book = LoopBook()
    stage = Stage(plan.seed, book, crowded=plan.crowded)
    stage.change_weather(plan.weather)
    await stage.begin()
    for step in plan.steps:
        await stage.take(step)
    await stage.settle()
    over_at = book.now()
    left = await stage.close()
    return History(
        book.events,
        orderly=plan.orderly,
        calm=plan.calm,
        crowded=plan.crowded,
        left_over=left + problems,
        over_at=over_at,
    )


def play(plan: plans.Plan) -> History:
    """The history of a plan."""
    logging.disable(logging.CRITICAL)
    try:
        return run_in_virtual_time(_history(plan), seed=plan.seed, limit_s=86_400)
    finally:
        logging.disable(logging.NOTSET)
