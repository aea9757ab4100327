"""Real time under load, with kills: ``python -m tests.bus.hour [--minutes M] [--seed S] [--chapter SECONDS]``.

Two lasting nodes and three mortal ones, each a process of its own over ZeroMQ, tell, ask (with and without retries, by
address and by name, with arrays of up to 1 MiB, with handles to objects of up to 4 MiB) and stream to each other,
monitor each other, link actors across nodes and let timers tick. Mortal ones are killed (SIGKILL) and started again,
all are stopped now and then (SIGSTOP) and go on. Every chapter ends in quiet: all calls end, the mortal nodes close,
the model of ``tests.bus.semantics`` judges what happened, and what the lasting nodes hold is measured, by themselves
and in /proc. It must be as little after the last chapter as after the first ones: each series' line is judged as in
``benchmarks.soak``. Exit status 1: something contradicts the semantics, or grows.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec

from benchmarks.soak import WARM_UP, Series, Verdict, figures, judge, table
from tests.bus.history import Down, Ended, History
from tests.bus.lasting import Held
from tests.bus.life import Settings
from tests.bus.semantics import violations
from tests.bus.town import END_S, Process, Town, start_process

LASTING = ["a", "b"]
MORTAL = ["c", "d", "e"]
CHAPTER_S = 24.0
"""Of calls and kills; starting, settling, giving back memory for objects and judging take some 18 s more."""

CALL_EVERY_S = 0.06
"""On each node, on average: the whole takes about half a core."""

QUIET_S = 3.0
"""At the end of the calls nothing is killed: those that were started again make themselves known to all."""

SLACK_S = 4.0
"""By which things may be late: longer than any process stands still."""

STOPS_S = [0.3, 1.0, 3.0]
LASTING_STOPS_S = [0.3, 0.7]
"""Too short for a lasting node to be taken for lost: nobody would ever speak to it again."""

UNITS = {"tasks": "tasks", "objects": "objects", "blocks": "objects", "heap_mb": "MB"}
"""Of what a node says of itself; all else are entries."""


class Outcome(msgspec.Struct):
    """Of a run."""

    chapters: int = 0
    deaths: int = 0
    stops: int = 0
    violations: list[str] = []
    happened: dict[str, int] = {}
    ended: dict[str, int] = {}  # how asks and streams did
    held: dict[str, list[Held]] = {}
    series: dict[str, Series] = {}


class Hour:
    """See the module docstring. ``directory`` holds what is kept of chapters with violations."""

    def __init__(self, directory: Path, seed: int, chapter_s: float) -> None:
        self._directory = directory
        self._chance = random.Random(seed)
        self._seed = seed
        self._chapter_s = chapter_s
        self._begun_at = time.monotonic()
        self._guests: dict[str, Process] = {}
        self._happened: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self.outcome = Outcome(violations=[], held={name: [] for name in LASTING}, series={})

    def run(self, minutes: float) -> Outcome:
        try:
            for name in LASTING:
                settings = self._plain(name=name, peers=[other for other in [*LASTING, *MORTAL] if other != name])
                self._guests[name] = start_process("tests.bus.lasting", settings, self._output(name))
            while time.monotonic() < self._begun_at + 60 * minutes:
                self._chapter(self.outcome.chapters)
                self.outcome.chapters += 1
            (self._directory / "end").touch()
            self._blame("the end", self._last_words())
        finally:
            for process in self._guests.values():
                process.kill()
                process.wait()
        self.outcome.happened, self.outcome.ended = dict(self._happened), dict(self._ended)
        return self.outcome

    def _plain(self, name: str = "", peers: list[str] | None = None) -> Settings:
        return Settings(
            directory=str(self._directory),
            name=name,
            peers=peers or [],
            lasting=LASTING,
            seed=self._chance.getrandbits(32),
            call_every_s=CALL_EVERY_S,
            rich=True,
        )

    def _output(self, name: str) -> Path:
        return self._directory / f"{name}.out"

    def _last_words(self) -> list[str]:
        statuses = {name: process.wait(timeout=END_S) for name, process in self._guests.items()}
        wrong = [f"{name} ended with status {status}" for name, status in statuses.items() if status != 0]
        return wrong + [line for name in LASTING for line in self._output(name).read_text().splitlines()]

    # ---- a chapter -----------------------------------------------------------------------------------------------

    def _chapter(self, number: int) -> None:
        directory = self._directory / str(number)
        directory.mkdir()
        (directory / "open").touch()
        seed = self._chance.getrandbits(32)
        town = Town(directory, MORTAL, seed, guests=self._guests, slack_s=SLACK_S, plain=self._plain())
        try:
            town.begin()
            self._rage(town)
            history = town.finish()
        finally:
            town.end()
        self._judge(number, history)
        self.outcome.stops += town.stops
        for name in LASTING:
            held = msgspec.json.decode((directory / f"{name}.held").read_bytes(), type=Held)
            self.outcome.held[name].append(held)
        del history
        self._measure()
        self._say(number, town)
        if not any(text.startswith(f"chapter {number}:") for text in self.outcome.violations):
            shutil.rmtree(directory)

    def _rage(self, town: Town) -> None:
        chance, end = self._chance, time.monotonic() + self._chapter_s - QUIET_S
        while time.monotonic() < end:
            time.sleep(chance.uniform(0.5, 3.5))
            match chance.randrange(6):
                case 0 | 1 | 2:
                    town.kill(chance.choice(MORTAL), same_place=chance.random() < 0.5)
                case 3 | 4:
                    town.pause(chance.choice(MORTAL), chance.choice(STOPS_S))
                case _:
                    town.pause(chance.choice(LASTING), chance.choice(LASTING_STOPS_S))
        for name in MORTAL:
            town.address(name)  # a busy machine takes its time to start one
        time.sleep(QUIET_S)

    def _judge(self, number: int, history: History) -> None:
        self._blame(f"chapter {number}", violations(history))
        for event in history.events:
            self._happened[type(event).__name__] += 1
            if isinstance(event, Ended):
                self._ended[event.how] += 1
            elif isinstance(event, Down):
                self.outcome.deaths += event.killed

    def _blame(self, when: str, found: list[str]) -> None:
        self.outcome.violations += [f"{when}: {text}" for text in found]
        for text in found[:5]:
            print(f"{when}: {text}", flush=True)

    # ---- what is held --------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        gc.collect()
        now = time.monotonic() - self._begun_at
        pids = {name: process.pid for name, process in self._guests.items()}
        for name, pid in {**pids, "driver": os.getpid()}.items():
            for what, unit, value in figures(pid):
                self._note(f"{name} {what}", unit, now, value)
        for name in LASTING:
            for what, count in msgspec.structs.asdict(self.outcome.held[name][-1]).items():
                self._note(f"{name} {what}", UNITS.get(what, "entries"), now, float(count))

    def _note(self, name: str, unit: str, now: float, value: float) -> None:
        kept = self.outcome.series.setdefault(name, Series(name, unit, [], []))
        kept.seconds.append(now)
        kept.values.append(value)

    def _say(self, number: int, town: Town) -> None:
        latest = {name: series.values[-1] for name, series in self.outcome.series.items()}
        nodes = " | ".join(
            f"{name} {latest[f'{name} anonymous']:.1f} MB, {latest[f'{name} descriptors']:.0f} descriptors, "
            f"{latest[f'{name} tasks']:.0f} tasks, {latest[f'{name} blocks']:.0f} blocks"
            for name in LASTING
        )
        minutes = (time.monotonic() - self._begun_at) / 60
        print(
            f"chapter {number}, {minutes:.1f} min: {len(town.events):,} events, {self.outcome.deaths} killed and "
            f"{self.outcome.stops} stopped so far, {len(self.outcome.violations)} violations | {nodes}",
            flush=True,
        )


def verdicts(outcome: Outcome) -> list[Verdict]:
    """Of each series, after the warm-up."""
    end = max((series.seconds[-1] for series in outcome.series.values()), default=0.0)
    return [judge(series, end * WARM_UP) for series in outcome.series.values()]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.bus.hour", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chapter", type=float, default=CHAPTER_S, metavar="SECONDS", help="of calls and kills")
    arguments = parser.parse_args(argv)
    directory = Path(tempfile.mkdtemp(prefix="rollart-hour-"))
    outcome = Hour(directory, arguments.seed, arguments.chapter).run(arguments.minutes)
    found = verdicts(outcome)
    print(table(found))
    times = os.times()
    cores = (times.user + times.system + times.children_user + times.children_system) / (60 * arguments.minutes)
    print(f"{outcome.chapters} chapters, {outcome.deaths} killed, {outcome.stops} stopped; {cores:.2f} cores")
    print(f"what happened: {outcome.happened}")
    print(f"how asks and streams ended: {outcome.ended}")
    print(f"{len(outcome.violations)} violations" + (f", kept in {directory}" if outcome.violations else ""))
    if not outcome.violations:
        shutil.rmtree(directory)
    grows = [verdict.name for verdict in found if not verdict.flat]
    print("verdict: flat" if not grows else f"verdict: NOT flat: {', '.join(grows)}")
    return 1 if grows or outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
