"""A process with one node over ZeroMQ that calls others at random and writes down what happens.

    python -m tests.bus.life '<Settings as JSON>'

It finds its peers by the files that they write, stops calling when there is a file ``stop``, and closes when there is a
file ``close``. Of one that is killed, what it wrote so far remains. ``tests.bus.lasting`` is one that does so for
history after history.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import sys
import time
from pathlib import Path

import msgspec

import bus.asking
from actors.core import Node
from actors.core.launch import die_with_parent
from bus.answering import Answering
from bus.message import NodeAddress
from tests.bus import plans
from tests.bus.dealings import Clock, FolderDirectory, Pairs, publish
from tests.bus.history import AnyEvent, Down, Up
from tests.bus.workers import Caller, public_name

CALL_EVERY_S = 0.01
RESEND_AFTER_S = 0.3
SILENCE_S = 2.0
NAMES = "names"
"""The folder of the directory, beside the one of the history."""

WHOM: list[plans.Whom] = ["newest", "newest", "newest", "first", "any", "nobody"]
CALLS: list[str] = ["tell", "ask", "stream"]


class Settings(msgspec.Struct, frozen=True):
    directory: str = ""
    name: str = ""
    peers: list[str] = []
    lasting: list[str] = []  # of them: those that live longer than the history, and so must not be taken for lost
    seed: int = 0
    port: int = 0
    forgetful: bool = False  # takes a repeated ask for a new one: the checker must see it
    call_every_s: float = CALL_EVERY_S
    rich: bool = False  # calls by name and with arrays, links across nodes and timers are part of it


class FileBook:
    """One line an event, each in one call: nothing of it is lost or torn when the process is killed."""

    def __init__(self, path: Path, first_op: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._ops = itertools.count(first_op)

    def turn(self, path: Path) -> None:
        """Go on in another file."""
        os.close(self._file)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def now(self) -> float:
        return time.monotonic()  # one clock for all processes of a machine

    def next_op(self) -> int:
        return next(self._ops)

    def write(self, event: AnyEvent) -> None:
        os.write(self._file, msgspec.json.encode(event) + b"\n")


async def appears(directory: Path, name: str) -> None:
    for _ in range(6_000):
        if (directory / name).exists():
            return
        await asyncio.sleep(0.02)
    raise TimeoutError(f"{directory / name} did not appear within two minutes")


def read_address(path: Path) -> NodeAddress | None:
    """None where there is no such file: a killed node's is taken away."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=NodeAddress)
    except FileNotFoundError:
        return None


class Person:
    """Calls whom it knows."""

    def __init__(self, settings: Settings, caller: Caller, pairs: Pairs | None) -> None:
        self._settings = settings
        self._directory = Path(settings.directory)
        self._caller = caller
        self._pairs = pairs
        self._chance = random.Random(settings.seed)
        self._known: dict[str, list[NodeAddress]] = {name: [] for name in settings.peers}

    async def until_stopped(self) -> None:
        while not (self._directory / "stop").exists():
            self._look_around()
            name = self._chance.choice(self._settings.peers)
            if self._known[name]:
                self._call(self._known[name])
            await asyncio.sleep(self._chance.expovariate(1 / self._settings.call_every_s))

    def _look_around(self) -> None:
        for name, known in self._known.items():
            address = read_address(self._directory / f"{name}.address")
            if address is not None and address not in known:
                known.append(address)
                self._watch(address)

    def _watch(self, address: NodeAddress) -> None:
        if self._chance.random() < 0.5 and address.name not in self._settings.lasting:
            self._caller.node.watch(address, silence_s=SILENCE_S, on_lost=lambda why: None)
        self._caller.call(plans.Monitor(0, 0, "newest"), address)

    def _call(self, known: list[NodeAddress]) -> None:
        chance = self._chance
        lane = chance.choice([0, 0, 1])
        whom = chance.choice(WHOM if self._pairs is None else [*WHOM, "named", "named"])
        target = chance.choice(known) if whom == "first" else known[-1]
        timeout_s = chance.choice([0.5, 3.0])
        step: plans.Tell | plans.Ask | plans.Stream
        match chance.choice(CALLS if self._pairs is None else [*CALLS, *CALLS, *CALLS, "load", "object", "pair"]):
            case "tell":
                step = plans.Tell(0, 0, lane, whom, chance.randint(1, 5))
            case "ask":
                retries, delay_s = chance.choice([0, 1, 10]), chance.choice([0.0, 0.0, 0.4])
                leave_s = chance.choice([0.0, 0.0, 0.0, 0.002])
                step = plans.Ask(0, 0, lane, whom, retries, timeout_s, delay_s, chance.random() < 0.2, leave_s)
            case "stream":
                pace_s, leave = chance.choice([0.0, 0.005]), chance.choice([-1, -1, 1, 20])
                step = plans.Stream(0, 0, lane, whom, chance.randint(0, 60), timeout_s, pace_s, leave)
            case "load":
                kilobytes = chance.choice([1, 64, 1024])
                step = plans.Ask(0, 0, 1, whom, chance.choice([0, 10]), timeout_s, kilobytes=kilobytes)
            case "object":
                kilobytes = chance.choice([1, 64, 4096])
                retries = chance.choice([0, 10])
                step = plans.Ask(0, 0, lane, whom, retries, timeout_s, kilobytes=kilobytes, by_handle=True)
            case _:
                if self._pairs is not None:
                    self._pairs.add(known[-1], lasts_s=chance.choice([0.2, 2.0, 10.0]))
                return
        self._caller.call(step, target)


class Share:
    """One node's share in one history."""

    def __init__(self, settings: Settings, caller: Caller, book: FileBook, pairs: Pairs | None) -> None:
        self._settings = settings
        self._directory = Path(settings.directory)
        self._caller = caller
        self._book = book
        self._pairs = pairs

    async def take(self) -> list[str]:
        """Until everybody is to close; returns what was wrong with timers."""
        name, node = self._settings.name, self._caller.node
        clock = Clock()
        ticking = await node.spawn(lambda: clock, "clock") if self._pairs is not None else None
        publish(self._directory / f"{name}.address", node.address)
        await Person(self._settings, self._caller, self._pairs).until_stopped()
        await asyncio.gather(*self._caller.calls, return_exceptions=True)
        if self._pairs is not None:
            await self._pairs.let_go()
        if ticking is not None:
            await node.stop(ticking)
        publish(self._directory / f"{name}.idle", node.address.epoch)
        await appears(self._directory, "close")
        return clock.wrong


async def live(settings: Settings) -> None:
    directory = Path(settings.directory)
    epoch = time.monotonic_ns()
    book = FileBook(directory / f"{settings.name}-{epoch}.events", first_op=epoch)
    names = FolderDirectory(directory.parent / NAMES) if settings.rich else None
    async with Node(settings.name, port=settings.port, epoch=epoch, directory=names) as node:
        caller = Caller(book, node)
        pairs = Pairs(book, node) if settings.rich else None
        book.write(Up(at=book.now(), life=caller.life))
        await caller.staff()
        if settings.rich:
            await node.announce(public_name(settings.name), caller.ref)
        wrong = await Share(settings, caller, book, pairs).take()
        book.write(Down(at=book.now(), life=caller.life, killed=False))
    left = caller.left_over() + [repr(task) for task in asyncio.all_tasks() - {asyncio.current_task()}]
    publish(directory / f"{settings.name}.left", left + wrong)


def begin() -> Settings:
    """What every process here does first."""
    die_with_parent()
    logging.basicConfig(level=logging.ERROR)
    bus.asking.RESEND_AFTER_S = RESEND_AFTER_S
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    if settings.forgetful:
        setattr(Answering, "_first_time", lambda self, header: True)  # noqa: B010 (mypy: to assign it is no method)
    return settings


def main() -> None:
    asyncio.run(live(begin()))


if __name__ == "__main__":
    main()
