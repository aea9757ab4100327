"""A day of calls and faults in virtual time: ``python -m tests.bus.storm [--events N] [--hours H] [--seed S]``.

The day is a row of chapters. In each of them nodes call each other, crash, part and come back, in its own weather; then
everything settles, the model of ``tests.bus.semantics`` judges the chapter, and what the nodes hold is measured. It
must be as little after the last chapter as after the first ones.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import random
import sys
import time
from pathlib import Path

import msgspec

from bus.virtual_time import run
from tests.bus import plans
from tests.bus.histories import LONGEST_S, LoopBook, Stage
from tests.bus.history import Down, History, Staffed, Up
from tests.bus.semantics import violations

NODES = 6
LASTING = 2
"""The first ones live through the whole day."""

CHAPTERS_AN_HOUR = 10
REMEMBERED = 3
"""Incarnations of each node that are still called now and then."""

DELIVERED_A_CALL = 5.3
"""About so many messages come of one call, on average: the rate of calls follows from it."""


class Held(msgspec.Struct, frozen=True):
    """What there is in memory after a chapter."""

    resident_mib: float
    objects: int
    tasks: int
    unfinished: int  # asks, and streams at either end
    answers: int  # recorded, in case that they are asked for again
    timers: int


class Outcome(msgspec.Struct):
    """Of a storm."""

    delivered: int
    virtual_s: float
    calls: int
    deaths: int
    digest: str
    held: list[Held]
    violations: list[str]
    lost: dict[str, int]


class Storm:
    """See the module docstring."""

    def __init__(self, events: int, hours: float, seed: int) -> None:
        self._chance = random.Random(seed)
        self._chapters = max(1, round(hours * CHAPTERS_AN_HOUR))
        self._chapter_s = hours * 3600 / self._chapters - LONGEST_S
        self._calls_a_s = events / self._chapters / DELIVERED_A_CALL / self._chapter_s
        self._book = LoopBook()
        self._stage = Stage(seed, self._book, NODES)
        self._problems: list[str] = []
        self._over_at = 0.0
        self.outcome = Outcome(0, 0.0, 0, 0, "", [], [], {})

    async def run(self) -> Outcome:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self._problems.append(repr(context)))
        await self._stage.begin()
        for number in range(self._chapters):
            weather = self._weather()
            self._stage.change_weather(weather)
            await self._rage()
            await self._settle()
            self._judge(number, weather)
        self.outcome.violations += [f"at the end: {text}" for text in await self._stage.close()]
        network = self._stage.network
        self.outcome.delivered, self.outcome.digest = network.counters["delivered"], network.digest
        self.outcome.virtual_s = network.loop.time()
        self.outcome.lost = {name: count for name, count in network.counters.items() if name.startswith("lost")}
        return self.outcome

    # ---- a chapter -----------------------------------------------------------------------------------------------

    def _weather(self) -> plans.Weather:
        chance = self._chance
        faults = [chance.choice([0.0, 0.0, 0.001, 0.05]) if chance.random() < 0.5 else 0.0 for _ in range(3)]
        return plans.Weather(chance.choice([0.0, 0.0005, 0.005]), *faults)

    async def _rage(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._chapter_s
        fault_at = loop.time() + self._chance.expovariate(1 / 20)
        while loop.time() < end:
            await asyncio.sleep(self._chance.expovariate(self._calls_a_s))
            await self._stage.take(self._call())
            self.outcome.calls += 1
            if loop.time() > fault_at:
                await self._stage.take(self._fault())
                fault_at = loop.time() + self._chance.expovariate(1 / 20)

    def _pair(self) -> tuple[int, int]:
        source, target = self._chance.sample(range(NODES), 2)
        return source, target

    def _call(self) -> plans.Step:
        chance = self._chance
        pair, lane = self._pair(), chance.choice([0, 0, 1])
        whom: plans.Whom = chance.choice(["newest", "newest", "newest", "newest", "first", "any", "nobody"])
        timeout_s = chance.choice([0.5, 5.0, 20.0])
        kind = chance.random()
        if kind < 0.4:
            return plans.Tell(*pair, lane, whom, chance.randint(1, 5))
        if kind < 0.8:
            retries, delay_s = chance.choice([0, 1, 10]), chance.choice([0.0, 0.0, 0.3, 3.0])
            leave_s = chance.choice([0.0, 0.0, 0.0, 0.0002, 1.0])
            return plans.Ask(*pair, lane, whom, retries, timeout_s, delay_s, chance.random() < 0.2, leave_s)
        pace_s, leave = chance.choice([0.0, 0.0, 0.02]), chance.choice([-1, -1, -1, 1, 20])
        return plans.Stream(*pair, lane, whom, chance.randint(0, 60), timeout_s, pace_s, leave)

    def _fault(self) -> plans.Step:
        chance, (one, other) = self._chance, self._pair()
        mortal = chance.randrange(LASTING, NODES)
        match chance.randrange(8):
            case 0 | 1:
                killed, again, same_place = (chance.random() < share for share in (0.7, 0.8, 0.5))
                return plans.End(mortal, killed, again, same_place)
            case 2:
                return plans.Part(one, cut=chance.random() < 0.5)
            case 3 | 4:
                return plans.Heal()
            case 5:
                return plans.Cut(one, other)
            case 6:
                return plans.Watch(one, mortal, silence_s=3.0)
            case _:
                return plans.Lose(one, mortal)

    async def _settle(self) -> None:
        """Everything ends; then all but the lasting ones live anew, so that nobody takes a living one for lost."""
        await self._stage.settle()
        self._over_at = self._book.now()
        for number in range(LASTING, NODES):
            await self._stage.take(plans.End(number, killed=False, again=True, same_place=False))
        await asyncio.sleep(1)

    def _judge(self, number: int, weather: plans.Weather) -> None:
        plan = plans.Plan(0, weather, [])
        history = History(self._book.events, orderly=plan.orderly, over_at=self._over_at)
        self.outcome.deaths += sum(isinstance(event, Down) for event in self._book.events)
        left = [text for post in self._stage.everyone() if not post.up for text in post.left_over()]
        found = violations(msgspec.structs.replace(history, left_over=left + self._problems))
        self.outcome.violations += [f"chapter {number}: {text}" for text in found]
        self._problems.clear()
        self._forget()
        self.outcome.held.append(self._held())

    def _forget(self) -> None:
        """What is over is not needed to judge what comes."""
        for posts in self._stage.posts:
            del posts[:-REMEMBERED]
            for post in posts:
                post.calls.clear()
        kept = {post.life for post in self._stage.everyone()}
        lives = [event for event in self._book.events if isinstance(event, Up | Staffed | Down) and event.life in kept]
        self._book.events = list(lives)
        self._book.killed &= kept
        self._book.senders.clear()

    def _held(self) -> Held:
        gc.collect()
        living: list[dict[str, int]] = [
            post.node.describe()["unfinished"] for post in self._stage.everyone() if post.up
        ]
        answers = sum(unfinished["answers"] for unfinished in living)
        loop = self._stage.network.loop
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return Held(
            resident_mib=pages / 256,
            objects=len(gc.get_objects()),
            tasks=len(asyncio.all_tasks()),
            unfinished=sum(sum(unfinished.values()) for unfinished in living) - answers,
            answers=answers,
            timers=len(getattr(loop, "_timers", [])),
        )


def storm(events: int, hours: float, seed: int) -> Outcome:
    """In virtual time."""

    async def main() -> Outcome:
        return await Storm(events, hours, seed).run()

    logging.disable(logging.CRITICAL)
    try:
        return run(main(), limit_s=hours * 3600 * 10)
    finally:
        logging.disable(logging.NOTSET)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    start, cpu = time.perf_counter(), time.process_time()
    outcome = storm(arguments.events, arguments.hours, arguments.seed)
    print(
        f"{outcome.delivered:,} messages delivered in {outcome.virtual_s / 3600:.1f} h of virtual time, of "
        f"{outcome.calls:,} calls; {outcome.deaths:,} nodes ended and came back; lost: {outcome.lost}"
    )
    for name, held in (("after the first chapter", outcome.held[0]), ("after the last", outcome.held[-1])):
        print(f"{name}: {held}")
    print(f"digest {outcome.digest}; {len(outcome.violations)} violations")
    print("\n".join(outcome.violations[:20]))
    print(f"{time.perf_counter() - start:.0f} s, {time.process_time() - cpu:.0f} s of CPU time", file=sys.stderr)


if __name__ == "__main__":
    main()
