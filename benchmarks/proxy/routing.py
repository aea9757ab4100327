"""How long the proxy takes to choose among 1,000 engines of three classes, with 20,000 requests in flight.

    next turn or new trajectory --LLMProxy.route, timed--> engine --(an answer of any of the 20,000)--> Served, untimed

The proxy is the real one, on a node; its engines' hosts are one actor there that takes messages and says nothing. Two
versions of the weights are served, as in the middle of a swap; a task has declared classes, one has ordered shares; one
request in ten is a new trajectory, the others are the next turn of one, whose prefix an engine has. Now and then an
engine is suspended and another serves again. Garbage is collected as in any process.

Invariant: each timed call ends with the request in an engine's books and outbox; none waits in the proxy. The figures
are those of the round with the least median: what else runs on the machine makes a round longer, and nothing shorter.
"""

from __future__ import annotations

import asyncio
import random
import time
from statistics import median, quantiles

import numpy as np

from actors.core import Actor, Node, Ref, handler
from actors.proxy.engines.progress import Effort
from actors.proxy.engines.protocol import EngineLimits, GenerateRequest
from actors.proxy.messages import Add, Assign, EngineReady, HostAdd, HostForget, Served, TrajectoryEnded
from actors.proxy.proxy import LLMProxy
from benchmarks.proxy.reading import Reading
from bus.message import NodeAddress

ENGINES = {"H800": 400, "H20": 400, "A100": 200}
PLACES = 64
IN_FLIGHT = 20_000
TASKS = ("games", "math", "web")
AFFINITY = {"games": "H800", "default": "H20"}
SHARES = {"web": {"H20": 0.5, "A100": 0.3, "H800": 0.2}}
FLUSHED_EVERY = 32
"""Requests of one turn of the loop."""
RESTS_EVERY = 500
"""Requests, until another engine is suspended and the last one serves again."""


class Sink(Actor):
    """All engines' hosts."""

    @handler
    async def add(self, message: HostAdd) -> None:
        """It is never answered from here."""

    @handler
    async def forget(self, message: HostForget) -> None:
        """There is nothing."""


class Fleet:
    """No processes."""

    async def start(self) -> None:
        """There are none."""

    def ready(self, name: str, address: NodeAddress) -> None:
        """They live as long as this."""

    def judge(self, name: str, effort: Effort, requests: int) -> bool:
        return False

    async def retire(self, name: str) -> None:
        """There are none."""

    async def stop(self) -> None:
        """There are none."""


class Load:
    """Trajectories and their requests."""

    def __init__(self, proxy: LLMProxy, asker: Ref) -> None:
        self.proxy = proxy
        self.took_ns: list[int] = []
        self._asker = asker
        self.chance = random.Random(0)
        self._turns: dict[str, tuple[int, int]] = {}  # trajectory -> turn, length
        self._in_flight: list[str] = []  # trajectories that wait
        self._idle: list[str] = []
        self._prompt = np.zeros(1 << 16, np.int32)
        self._number = 0

    def ask(self) -> None:
        """The next request, timed."""
        trajectory = self._next()
        turn, length = self._turns[trajectory]
        request = GenerateRequest(f"{trajectory}/{turn}", trajectory, self._prompt[:length], 512)
        task = TASKS[int(trajectory[1:]) % len(TASKS)]
        add = Add(request, self._asker, task, turn)
        self.proxy._costs.asked(task, trajectory, length, asyncio.get_running_loop().time(), turn)
        start = time.perf_counter_ns()
        self.proxy.route(add)
        self.took_ns.append(time.perf_counter_ns() - start)
        self._in_flight.append(trajectory)

    def _next(self) -> str:
        if self._idle and self.chance.random() < 0.9:
            return self._taken(self._idle)
        self._number += 1
        trajectory = f"t{self._number}"
        self._turns[trajectory] = 0, self.chance.randint(100, 4000)
        return trajectory

    def _taken(self, of: list[str]) -> str:
        index = self.chance.randrange(len(of))
        of[index], of[-1] = of[-1], of[index]
        return of.pop()

    async def answer(self) -> None:
        """Any of those that wait."""
        trajectory = self._taken(self._in_flight)
        turn, length = self._turns[trajectory]
        id_ = f"{trajectory}/{turn}"
        sampled = self.chance.randint(1, 200)
        await self.proxy.served(Served(self.proxy._where[id_], [id_], sampled, sampled=[sampled]))
        if turn < 9:
            self._turns[trajectory] = turn + 1, length + sampled + self.chance.randint(10, 300)
            self._idle.append(trajectory)
        else:
            del self._turns[trajectory]
            await self.proxy.trajectory_ended(TrajectoryEnded(trajectory))


async def play(rounds: int, requests: int) -> list[list[int]]:
    """Nanoseconds of each decision of each round, once as many are in flight as there are to be."""
    classes = {f"{name}-{number:03}": name for name, count in ENGINES.items() for number in range(count)}
    async with Node("control") as node:
        proxy = LLMProxy(classes, AFFINITY, failed=lambda error: None)
        proxy.fleet = Fleet()
        await node.spawn(lambda: proxy, "proxy", restarts=0)
        sink = await node.spawn(Sink, "sink")
        for number, (name, engine) in enumerate(proxy._engines.items()):
            await proxy.engine_ready(EngineReady(name, sink, EngineLimits(PLACES, 1 << 16), 0.0))
            engine.version, engine.state = number % 2, "serving"
        await proxy.assign(Assign(SHARES, "benchmark"))
        load = Load(proxy, sink)
        for _ in range(IN_FLIGHT):
            load.ask()
            if len(load.took_ns) % FLUSHED_EVERY == 0:
                await asyncio.sleep(0)
        resting = None
        took: list[list[int]] = []
        for _ in range(rounds):
            load.took_ns = []
            for number in range(requests):
                await load.answer()
                load.ask()
                if number % FLUSHED_EVERY == 0:
                    await asyncio.sleep(0)
                if number % RESTS_EVERY == 0:
                    if resting is not None:
                        resting.state = "serving"
                    resting = load.chance.choice(list(proxy._engines.values()))
                    resting.state = "suspended"
            took.append(load.took_ns)
        if proxy._queued or len(proxy._where) != IN_FLIGHT:
            raise RuntimeError(f"expected {IN_FLIGHT} requests at engines, found {len(proxy._where)}")
        return took


def measure(quick: bool) -> Reading:
    rounds = asyncio.run(play(3 if quick else 10, 2_000 if quick else 10_000))
    took_us = [ns / 1e3 for ns in min(rounds, key=median)]
    hundredths = quantiles(took_us, n=100)
    all_us = sorted(ns / 1e3 for one in rounds for ns in one)
    figures = {
        "routing_us_1000_engines": median(took_us),
        "routing_us_1000_engines_p99": hundredths[98],
    }
    rows = [
        "engines  in flight  decisions  median us  p90 us  p99 us",
        f"{sum(ENGINES.values()):<8} {IN_FLIGHT:<10} {len(took_us):<10} {median(took_us):<10.1f} {hundredths[89]:<7.1f}"
        f" {hundredths[98]:.1f}",
        f"{'':<8} {'all rounds':<10} {len(all_us):<10} {median(all_us):<10.1f} {all_us[len(all_us) * 9 // 10]:<7.1f}"
        f" {all_us[len(all_us) * 99 // 100]:.1f}",
    ]
    return Reading(figures, rows)
