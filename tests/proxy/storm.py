"""A storm over real engines: kills, hangs and restarts of the engines of two proxies, and of one of the proxies, under
load.

The proxies are processes of their own, and so are their engines. The weights never change, but their version does, so
that engines are suspended, reloaded and resumed in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from actors.core import Actor, Ref, handler
from actors.proxy.engines import EngineKind
from actors.proxy.engines.protocol import Completion, EngineLimits, GenerateRequest
from actors.proxy.kept import Kept
from actors.proxy.messages import Acknowledged, Add, Finished, KeptSoFar, ProxySet, ProxyState, Remove, RequestFailed
from bus.message import BusError
from tests.engines.reference import Reference, prompt
from tests.proxy.gateway import GatewaySettings
from tests.proxy.operating import Operator, Site, site

DISTINCT = 200
TOKENS = (80, 241)
"""So many that a request meets faults: 2,000 of them take about as long as 100 faults."""
LIMITS = EngineLimits(max_sequences=16, max_model_len=320)
PROXY_SILENCE_S = 20.0
ANSWER_TIMEOUT_S = 240.0
SETTLE_S = 180.0
"""Until whatever was killed last serves again, and the last answer has been told of."""


@dataclass(frozen=True)
class Plan:
    """``deck``: what happens, and how often. Of the proxies to the second one alone."""

    kind: EngineKind
    requests: int
    deck: dict[str, int]
    in_flight: int = 72
    silence_s: float = 8.0  # of an engine


class Played:
    """How it went."""

    def __init__(self, client: Client, chaos: Chaos) -> None:
        self.client = client
        self.chaos = chaos
        self.counters: Counter[str] = Counter()
        self.engines: Counter[str] = Counter()  # by state, in the end
        self.queued = 0
        self.in_flight = 0
        self.kib = (0, 0)  # of the first proxy, which nobody kills, at the beginning and in the end
        self.left: list[str] = []  # processes that outlived their site


def some_request(index: int) -> GenerateRequest:
    """The ``index``-th of those that are distinct: a third is greedy, the others have seeds."""
    chance = random.Random(index)
    greedy = index % 3 == 0
    return GenerateRequest(
        request_id=f"d{index}",
        trajectory=f"d{index}",
        prompt=prompt(chance.randrange(4, 60), index),
        max_tokens=chance.randrange(*TOKENS),
        temperature=0.0 if greedy else 1.0,
        seed=None if greedy else index,
    )


class Client(Actor):
    """Asks as an env host does: the proxy that the ring says; another one when that is gone."""

    def __init__(self, operator: Operator, requests: int) -> None:
        self._requests = requests
        self._proxies = operator.proxies
        self._proxies.on_follow(self._others)
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._added: dict[str, Add] = {}
        self._at: dict[str, Ref] = {}
        self.counters: Counter[str] = Counter()
        self._kept = Kept(self.counters)
        self.answers: dict[str, Completion] = {}
        self.failures: dict[str, str] = {}
        self.asked = 0
        self.late: list[Completion] = []
        self.asked_again = 0

    @handler
    async def finished(self, message: Finished) -> None:
        for completion in message.completions:
            future = self._waiting.get(completion.request_id)
            if future is None or future.done():
                self.late.append(completion)
            else:
                future.set_result(completion)

    @handler
    async def kept_so_far(self, message: KeptSoFar) -> None:
        ids = (id_ for id_ in message.report.request_ids if self._at.get(id_) == message.proxy)
        self._kept.take(message.report, {id_: self._added[id_] for id_ in ids})

    @handler
    async def failed(self, message: RequestFailed) -> None:
        future = self._waiting.get(message.request_id)
        if future is not None and not future.done():
            future.set_exception(RuntimeError(message.reason))

    async def play(self, until_done: asyncio.Event) -> None:
        """One request after the other, until there were enough and nothing happens any more."""
        while self.asked < self._requests or not until_done.is_set():
            id_ = f"r{self.asked}"
            self.asked += 1
            await self._one(id_, some_request(int(id_[1:]) % DISTINCT))

    async def _one(self, id_: str, request: GenerateRequest) -> None:
        future = self._waiting[id_] = asyncio.get_running_loop().create_future()
        add = Add(msgspec.structs.replace(request, request_id=id_, trajectory=id_), self.ref, keeps=True)
        self._added[id_] = add
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._ask(add)
                self.answers[id_] = await future
        except TimeoutError:
            self.failures[id_] = "no answer"
        except (BusError, RuntimeError) as error:
            self.failures[id_] = str(error)
        finally:
            for table in (self._waiting, self._added, self._at):
                table.pop(id_, None)
            self._kept.forget(id_)
            self._proxies.ended(self.node, id_, whole=True)

    async def _ask(self, add: Add) -> None:
        while True:
            proxy = await self._proxies.add(self.node, add, timeout_s=10.0, retries=3)
            if self._proxies.has(proxy):
                self._at[add.request.request_id] = proxy
                return

    def _others(self, found: ProxySet) -> None:
        there = {member.ref for member in found.members}
        for id_ in [id_ for id_, proxy in self._at.items() if proxy not in there]:
            del self._at[id_]
            self._added[id_] = self._kept.along(self._added[id_])
            self.asked_again += 1
            self.node.background(self._again(id_))

    async def _again(self, id_: str) -> None:
        try:
            await self._ask(self._added[id_])
        except BusError as error:
            future = self._waiting.get(id_)
            if future is not None and not future.done():
                future.set_exception(error)


class Chaos:
    """What is done to a site, in an order that the seed says."""

    def __init__(self, made: Site, plan: Plan, seed: int) -> None:
        self._site = made
        self._operator = made.operator
        self._plan = plan
        self._chance = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.removed = 0
        self.left_behind: list[psutil.Process] = []  # engines of proxies that were killed

    async def run(self, client: Client) -> None:
        plan, begun = self._plan, time.monotonic()
        deck = [what for what, count in plan.deck.items() for _ in range(count)]
        self._chance.shuffle(deck)
        for number, what in enumerate(deck):
            due = plan.requests * number // len(deck) - plan.in_flight
            await until_slowly(lambda due=due: len(client.answers) + len(client.failures) >= due)  # type: ignore[misc]
            await asyncio.sleep(self._chance.uniform(0.5, 2.0))
            answered = f"{len(client.answers)} answers, {len(client.failures)} failures"
            print(f"{time.monotonic() - begun:6.0f} s: {answered}, then fault {number + 1}: {what}", flush=True)
            self.done[await self._do(what)] += 1

    async def _do(self, what: str) -> str:
        """Returns what it was in the end: where no engine may be removed, one is killed."""
        if "an engine" in what:
            if what == "remove an engine":
                if await self._remove():
                    return what
                what = "kill an engine"
            engine = await self._an_engine()
            if what == "stop an engine for a moment":
                await self._stop(engine, self._chance.uniform(0.2, 2.0))
            else:
                _send(engine, signal.SIGKILL if what == "kill an engine" else signal.SIGSTOP)
            return what
        second = self._operator.names[1]
        await until_slowly(lambda: second in self._operator.children and self._operator.children[second].running)
        proxy = psutil.Process(self._operator.children[second].pid)
        if what == "stop a proxy for a moment":
            await self._stop(proxy, self._chance.uniform(0.2, 2.0))
            return what
        engines = list(self._operator.engines(second).values())
        deaths = self._operator.deaths[second]
        _send(proxy, signal.SIGKILL if what == "kill a proxy" else signal.SIGSTOP)
        await until_slowly(lambda: self._operator.deaths[second] > deaths)
        self.left_behind += engines
        return what

    async def _an_engine(self) -> psutil.Process:
        while True:
            engines = [one for name in self._operator.names for one in self._operator.engines(name).values()]
            if engines:
                return self._chance.choice(sorted(engines, key=lambda one: one.pid))
            await asyncio.sleep(0.2)

    async def _stop(self, process: psutil.Process, seconds: float) -> None:
        _send(process, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        _send(process, signal.SIGCONT)

    async def _remove(self) -> bool:
        """An engine that is not the last one of its proxy, if there is one; only a new proxy brings it back."""
        several = []
        for state in await self._operator.describe():
            left = [engine.name for engine in state.engines if engine.state != "removed"]
            several += [left] if len(left) > 1 else []
        if not several:
            return False
        name = self._chance.choice(self._chance.choice(several))
        ref = next(ref for ref in self._operator.proxies.refs if name.startswith(f"{ref.node.name}."))
        order = Remove(name, "an operator's order")
        await self._site.node.ask(ref, order, Acknowledged, timeout_s=30.0, retries=3)
        self.removed += 1
        return True


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return  # it died of something else


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until_slowly(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110  (processes are looked at)
        await asyncio.sleep(0.1)


async def _publish(made: Site) -> None:
    while True:
        await asyncio.sleep(10.0)
        await made.next_version()


async def storm(directory: Path, reference: Reference, plan: Plan, seed: int) -> Played:
    """Play it; ``directory`` has the policy."""
    settings = GatewaySettings(
        kind=plan.kind,
        policy_directory=str(directory / "policy"),
        limits=LIMITS,
        restarts=1_000,
        silence_s=plan.silence_s,
        tokens_every_s=0.1,
    )
    async with site(directory, ["proxy-0", "proxy-1"], settings, reference, PROXY_SILENCE_S) as made:
        client, over = Client(made.operator, plan.requests), asyncio.Event()
        played = Played(client, Chaos(made, plan, seed))
        await made.node.spawn(lambda: client, "client", restarts=0)
        publishing = asyncio.ensure_future(_publish(made))
        playing = [asyncio.ensure_future(client.play(over)) for _ in range(plan.in_flight)]
        first = psutil.Process(made.operator.children["proxy-0"].pid)
        before = first.memory_info().rss
        await played.chaos.run(client)
        over.set()
        await asyncio.gather(*playing)
        await _quiet(made)
        publishing.cancel()
        played.kib = before >> 10, first.memory_info().rss >> 10
        for state in await made.operator.describe():
            played.counters.update(state.counters)
            played.engines.update(engine.state for engine in state.engines)
            played.queued += state.queued
            played.in_flight += sum(engine.in_flight for engine in state.engines)
        everybody = psutil.Process().children(recursive=True)
    played.left = [one.name() for one in psutil.wait_procs(everybody, timeout=5)[1]]
    return played


async def _quiet(made: Site) -> None:
    """Until every engine that was not taken out of routing serves again, and none has a request; ``SETTLE_S`` at most,
    for what holds then is looked at."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            while not (made.operator.serves and _is_quiet(await made.operator.describe())):  # noqa: ASYNC110
                await asyncio.sleep(0.5)


def _is_quiet(states: list[ProxyState]) -> bool:
    engines = [engine for state in states for engine in state.engines]
    return not any(state.queued for state in states) and all(
        engine.state in ("serving", "removed") and not engine.in_flight for engine in engines
    )
