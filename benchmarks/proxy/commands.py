"""How soon the proxy accepts a command while a real vLLM engine generates: with 1, 32 and 256 requests in flight.

    this process (asks, as an env host and the weight sync do) --ZeroMQ--> the proxy's --ZeroMQ--> the engine's

A time is from the ask to its first answer, here: ``Accepted``, of an ABORT ``Acknowledged``. ADDs are of one token,
ABORTs of what was just added, and a swap (SUSPEND, UPDATE to the version that is staged, RESUME) comes once a second.

Invariant: as many requests as are said are under way during a window, each long enough to see its end; who has ended is
followed by another.

    python -m benchmarks.proxy.commands PLACE    (``measure`` starts it: the proxy's process)
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from actors.core import Actor, Node, Ref, handler
from actors.core.hosting import ChildSpec
from actors.core.launch import die_with_parent
from actors.proxy.engines.protocol import EngineLimits, GenerateRequest
from actors.proxy.fleet import EngineFleet
from actors.proxy.messages import (
    Abort,
    Accepted,
    Acknowledged,
    Add,
    Finished,
    Progress,
    RequestFailed,
    Resume,
    Stage,
    Staged,
    Suspend,
    TrajectoryEnded,
    Update,
)
from actors.proxy.proxy import LLMProxy
from actors.weightsync.manifest import Manifest
from actors.weightsync.messages import EngineJoined, EngineLeft
from actors.weightsync.publisher import WeightPublisher
from benchmarks.end_to_end import task
from benchmarks.end_to_end.bare import START_TIMEOUT_S, first_version
from benchmarks.proxy.reading import NotMeasurable, Reading

ROOT = Path(__file__).resolve().parents[2]
IN_FLIGHT = (1, 32, 256)
LIMITS = EngineLimits(max_sequences=max(IN_FLIGHT) + 4, max_model_len=512)
ENGINE = "engine-0"
EVERY_S = 0.02
"""A command as often as this: that is what the env hosts of some hundreds of trajectories ask."""

ASK_TIMEOUT_S = 60.0


class Place(msgspec.Struct, frozen=True):
    """Where the proxy's process is to be, and whom it answers to."""

    directory: str
    driver: Ref


class Ready(msgspec.Struct, frozen=True):
    """The proxy's process is up."""

    proxy: Ref
    source: Ref
    manifest: Manifest


class Driver(Actor):
    """Keeps requests under way, and hears of the engine."""

    def __init__(self) -> None:
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.joined: asyncio.Future[EngineJoined] = asyncio.get_running_loop().create_future()
        self.wanted = 0
        self.under_way: set[str] = set()
        self._numbers = itertools.count()

    @handler
    async def on_ready(self, message: Ready) -> None:
        self.ready.set_result(message)

    @handler
    async def on_joined(self, message: EngineJoined) -> None:
        self.joined.set_result(message)

    @handler
    async def on_left(self, message: EngineLeft) -> None:
        raise RuntimeError(f"engine {message.engine} left: {message.reason}")

    @handler
    async def failed(self, message: RequestFailed) -> None:
        raise RuntimeError(f"request {message.request_id} failed: {message.reason}")

    @handler
    async def finished(self, message: Finished) -> None:
        for completion in message.completions:
            self.under_way.discard(completion.request_id)
            self.node.tell(self.ready.result().proxy, TrajectoryEnded(completion.request_id))
        await self.fill()

    async def fill(self) -> None:
        """Bring the number of long requests to what it is to be."""
        while len(self.under_way) < self.wanted:
            add = self.request(LIMITS.max_model_len - 64)
            self.under_way.add(add.request.request_id)
            self.node.background(self.node.ask(self.ready.result().proxy, add, Accepted, timeout_s=ASK_TIMEOUT_S))

    def request(self, tokens: int) -> Add:
        """A new one, of so many tokens."""
        number = next(self._numbers)
        prompt = np.frombuffer(task.prompt(number).encode(), np.uint8).astype(np.int32)
        return Add(GenerateRequest(f"r{number}", f"r{number}", prompt, tokens, seed=number), self.ref)


class Commands:
    """Asks them one after the other, and keeps how long the first answers took (seconds), by command."""

    def __init__(self, node: Node, driver: Driver) -> None:
        self._node, self._driver = node, driver
        self.times: defaultdict[str, list[float]] = defaultdict(list)

    async def swap(self) -> None:
        ready, host = self._driver.ready.result(), self._driver.joined.result().host
        await self._node.ask(host, Stage(ready.manifest, ready.source), Staged, timeout_s=ASK_TIMEOUT_S)
        for command in (Suspend(ENGINE), Update(ENGINE, 0), Resume(ENGINE, 0)):
            await self._both(command)

    async def _both(self, command: Suspend | Update | Resume) -> None:
        progress: Any = Progress
        start, took = time.perf_counter(), None
        async for _ in self._node.stream(self._driver.ready.result().proxy, command, progress, timeout_s=ASK_TIMEOUT_S):
            took = took or time.perf_counter() - start
        self.times[type(command).__name__.upper()].append(took or ASK_TIMEOUT_S)

    async def add_and_abort(self) -> None:
        add = self._driver.request(1)
        await self._timed(add, Accepted)
        await asyncio.sleep(EVERY_S)
        await self._timed(Abort(add.request.request_id), Acknowledged)

    async def _timed(self, command: Add | Abort, reply: type[Accepted] | type[Acknowledged]) -> None:
        start = time.perf_counter()
        await self._node.ask(self._driver.ready.result().proxy, command, reply, timeout_s=ASK_TIMEOUT_S)
        self.times[type(command).__name__.upper()].append(time.perf_counter() - start)


def measure(quick: bool) -> Reading:
    """Raises ``NotMeasurable`` without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise NotMeasurable("vllm is not installed: bin/setup without --light")
    with tempfile.TemporaryDirectory(prefix="rollart-benchmark-") as directory:
        found = asyncio.run(_drive(Path(directory), 4.0 if quick else 25.0))
    rows = ["in flight  command   times  p50 ms  p99 ms  most ms"]
    p99 = {}
    for count, times in found.items():
        everything = [each for of_command in times.values() for each in of_command]
        for command, values in [*sorted(times.items()), ("all", everything)]:
            p50, p99[count], most = (1000 * float(np.percentile(values, q)) for q in (50, 99, 100))
            rows.append(f"{count:9}  {command:8}{len(values):7}{p50:8.2f}{p99[count]:8.2f}{most:9.2f}")
    return Reading({"command_p99_ms": max(p99.values())}, rows)


async def _drive(directory: Path, window_s: float) -> dict[int, dict[str, list[float]]]:
    found = {}
    async with Node("driver") as node:
        driver = Driver()
        place = Place(str(directory), await node.spawn(lambda: driver, "driver", restarts=0))
        process = _start(place)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await driver.ready
                await driver.joined
            await Commands(node, driver).swap()
            for count in IN_FLIGHT:
                driver.wanted = count
                await driver.fill()
                await asyncio.sleep(2.0)  # all of them run
                found[count] = await _window(Commands(node, driver), window_s)
        except TimeoutError:
            last = (directory / "output.log").read_text()[-3000:]
            raise RuntimeError(f"no engine was ready within {START_TIMEOUT_S:g} s:\n{last}") from None
        finally:
            process.kill()  # its engine dies with it
            process.wait()
    return found


def _start(place: Place) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "benchmarks.proxy.commands", msgspec.json.encode(place).decode()]
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (Path(place.directory) / "output.log").open("wb") as log:
        return subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, **settings})


async def _window(commands: Commands, window_s: float) -> dict[str, list[float]]:
    end = time.perf_counter() + window_s
    while (now := time.perf_counter()) < end:
        await commands.swap()
        while time.perf_counter() < min(now + 1.0, end):
            await commands.add_and_abort()
            await asyncio.sleep(EVERY_S)
    return dict(commands.times)


async def serve(place: Place) -> None:
    """The proxy's process, until it is killed."""
    directory = Path(place.directory)
    manifest, snapshot, _ = first_version(directory, task.SHAPE)
    async with Node("control") as node:
        proxy = LLMProxy({ENGINE: "cpu"}, {}, failed=_raise)
        settings = {
            "kind": "vllm",
            "policy_directory": str(directory),
            "dtype": "float32",
            "limits": msgspec.to_builtins(LIMITS),
            "seed": 0,
        }
        spec = ChildSpec(ENGINE, "benchmark", node.address, str(directory / "logs"), settings)
        proxy.fleet = EngineFleet(node, {ENGINE: (spec, {"OMP_NUM_THREADS": "1"})}, proxy, silence_s=60.0)
        gateway = await node.spawn(lambda: proxy, "proxy", restarts=0)
        publisher = WeightPublisher()
        source = await node.spawn(lambda: publisher, "publisher", restarts=0)
        publisher.publish(manifest, snapshot)
        proxy.introduce(place.driver)
        node.tell(place.driver, Ready(gateway, source, manifest))
        await proxy.fleet.start()
        await asyncio.Event().wait()


def _raise(error: BaseException) -> None:
    raise error


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(serve(msgspec.json.decode(sys.argv[1], type=Place)))
