"""Tokens per second of a vLLM engine behind our proxy, and of the same engine without it.

    proxy    two processes: proxy and asker in one, the engine's host process the other
    client   the asker in one, vLLM's core in another, between them vLLM's own client
             (``VLLM_ENABLE_V1_MULTIPROCESSING=1``: what ``vllm.LLM`` uses unless told otherwise); without a GPU vLLM
             then gives its worker a third process, so this is what users get, not an equal number of processes
    direct   one process, and no message at all

Invariant: all are the same class with the same settings and requests, the engine has one thread to compute with, and
they take turns: while one is measured the others have nothing under way and wait for a line on standard input.

    python -m benchmarks.end_to_end.serving proxy|client|direct DIRECTORY    (a side; ``measure`` starts them)

A side answers every line with one window's tokens per second of wall time. 32 requests are always under way: whenever
one is answered the next is added. The client's core keeps its random weights, which cost the same; every completion
has a given length, whatever the tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import psutil

from actors.core import Actor, Node, Ref, handler
from actors.core.hosting import ChildSpec
from actors.policy import write_config
from actors.proxy.engines import make_engine
from actors.proxy.engines.protocol import Engine, EngineLimits, GenerateRequest
from actors.proxy.fleet import EngineFleet
from actors.proxy.messages import Accepted, Add, Finished, TrajectoryEnded
from actors.proxy.proxy import LLMProxy
from actors.settings import TrainSettings
from actors.telemetry import Spans
from actors.trainer.backends import make_backend
from actors.trainer.rank import canary
from actors.weightsync.manifest import Manifest
from actors.weightsync.messages import Publish, Published
from actors.weightsync.publisher import Snapshot, WeightPublisher
from actors.weightsync.sync import WeightSync
from benchmarks.end_to_end import task

if TYPE_CHECKING:
    import torch

    from actors.trainer.backends.protocol import Backend

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("proxy", "client", "direct")
REQUESTS = 32
LIMITS = EngineLimits(max_sequences=REQUESTS, max_model_len=64)
WINDOW_S = 3.0
START_TIMEOUT_S = 300.0


class Throughput(msgspec.Struct, frozen=True):
    """Medians over the rounds of windows."""

    proxy: float  # tokens per second
    client: float
    direct: float
    vs_client: float  # the proxy's share of the client's in one round
    vs_direct: float  # its share of what one process does without any message
    rounds: int


def measure(rounds: int, directory: Path) -> Throughput:
    """Start all sides and let them take turns."""
    directory.mkdir(parents=True, exist_ok=True)
    sides = {name: _Side(name, directory / name) for name in SIDES}
    try:
        for side in sides.values():
            side.window()  # caches, lazy initialisation
        rates = [{name: side.window() for name, side in sides.items()} for _ in range(rounds)]
    finally:
        for side in sides.values():
            side.close()
    return Throughput(
        proxy=statistics.median(rate["proxy"] for rate in rates),
        client=statistics.median(rate["client"] for rate in rates),
        direct=statistics.median(rate["direct"] for rate in rates),
        vs_client=statistics.median(rate["proxy"] / rate["client"] for rate in rates),
        vs_direct=statistics.median(rate["proxy"] / rate["direct"] for rate in rates),
        rounds=rounds,
    )


class _Side:
    """A measured process, from outside."""

    def __init__(self, name: str, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._log = directory / "output.log"
        words = [sys.executable, "-m", "benchmarks.end_to_end.serving", name, str(directory)]
        settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with self._log.open("wb") as errors:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **settings},
                start_new_session=True,
            )

    def window(self) -> float:
        """Tokens per second. Raises ``RuntimeError`` with the side's last words."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the side was started without pipes")
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith('{"rate"'):
                return float(json.loads(line)["rate"])
        raise RuntimeError(f"a side of the throughput benchmark ended:\n{self._log.read_text()[-3000:]}")

    def close(self) -> None:
        """End it and its children."""
        family = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        self._process.kill()
        self._process.wait()
        for member in family:  # vLLM's do not die with their parent
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=10)


def request(index: int) -> GenerateRequest:
    """The ``index``-th."""
    prompt = np.frombuffer(task.prompt(index).encode(), np.uint8).astype(np.int32)
    length = task.COMPLETION_TOKENS - 15 + index * 7 % 31  # 32 on average; equal ones would all end in the same step
    return GenerateRequest(f"r{index}", f"r{index}", prompt, length, seed=index)


def first_version(directory: Path) -> tuple[Manifest, Snapshot, Backend]:
    """Random weights as version 0."""
    write_config(task.SHAPE, directory)
    backend = make_backend(directory, seed=0, settings=TrainSettings(), dtype="float32", from_scratch=True)
    snapshot = Snapshot(backend.export())
    tokens = canary(task.SHAPE.vocab_size, 0)
    return Manifest(0, "float32", snapshot.facts, tokens, backend.score(tokens)), snapshot, backend


def direct(directory: Path) -> None:
    """The engine in this process, in a loop of its own."""
    _, _, backend = first_version(directory)
    engine = make_engine(
        "vllm", directory, max_sequences=LIMITS.max_sequences, max_model_len=LIMITS.max_model_len, dtype="float32"
    )
    engine.load_weights(0, backend.export())
    drive(engine)


def client(directory: Path) -> None:
    """vLLM's core in another process, driven from a loop of this one."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    from actors.proxy.engines.vllm_engine import VllmEngine  # noqa: PLC0415  (reads the environment)

    class Client(VllmEngine):
        """Weights as they are: vLLM's client cannot carry an iterator of tensors."""

        def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
            self._version = version
            return {}

    write_config(task.SHAPE, directory)
    engine = Client(directory, max_sequences=LIMITS.max_sequences, max_model_len=LIMITS.max_model_len, dtype="float32")
    engine.load_weights(0, ())
    try:
        drive(engine)
    finally:
        engine.close()


def drive(engine: Engine) -> None:
    """One window a line, by the rules of ``Asker``: it begins with the first answer, and what is under way when it
    ends is finished before the other sides' windows."""
    added = 0
    for _ in sys.stdin:
        while engine.unfinished() < REQUESTS:
            engine.add(request(added))
            added += 1
        start, tokens = 0.0, 0
        while not start or time.perf_counter() - start < WINDOW_S:
            completions = engine.step()
            if start:
                tokens += sum(len(completion.tokens) for completion in completions)
            elif completions:
                start = time.perf_counter()
            for _ in completions:
                engine.add(request(added))
                added += 1
        rate = tokens / (time.perf_counter() - start)
        while engine.unfinished():
            engine.step()
        _tell(rate)


class Asker(Actor):
    """Keeps the proxy busy as an env host does: every ADD is asked, every end is told."""

    def __init__(self, proxy: Ref) -> None:
        self._proxy = proxy
        self._added = 0
        self.tokens = 0
        self.open = False
        self.under_way = 0
        self.answered = asyncio.Event()  # something was
        self.idle = asyncio.Event()  # nothing is under way any more

    async def more(self) -> None:
        """Bring the number of requests to ``REQUESTS``."""
        while self.open and self.under_way < REQUESTS:
            add = Add(request(self._added), self.ref)
            self._added += 1
            self.under_way += 1
            self.node.background(self._ask(add))

    async def _ask(self, add: Add) -> None:
        await self.node.ask(self._proxy, add, Accepted, timeout_s=10.0)

    @handler
    async def finished(self, message: Finished) -> None:
        for completion in message.completions:
            self.tokens += len(completion.tokens)
            self.under_way -= 1
            self.node.tell(self._proxy, TrajectoryEnded(completion.request_id))
        self.answered.set()
        await self.more()
        if not self.under_way:
            self.idle.set()


async def proxied(directory: Path) -> None:
    """The engine in a process of its own behind the proxy of this one, with weights that came as they always do."""
    manifest, snapshot, _ = first_version(directory)
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    threading.Thread(target=_read_lines, args=(loop, lines.put_nowait), daemon=True).start()
    async with Node("control") as node:
        proxy = LLMProxy({"engine-0": "cpu"}, {}, failed=_raise)
        settings = {
            "kind": "vllm",
            "policy_directory": str(directory),
            "dtype": "float32",
            "limits": msgspec.to_builtins(LIMITS),
            "seed": 0,
        }
        spec = ChildSpec("engine-0", "benchmark", node.address, str(directory / "logs"), settings)
        proxy.fleet = EngineFleet(node, {"engine-0": (spec, {"OMP_NUM_THREADS": "1"})}, proxy, silence_s=60.0)
        gateway = await node.spawn(lambda: proxy, "proxy", restarts=0)
        publisher = WeightPublisher()
        source = await node.spawn(lambda: publisher, "publisher", restarts=0)
        sync = await node.spawn(lambda: WeightSync(gateway, Spans("weightsync")), "weightsync", restarts=0)
        proxy.introduce(sync)
        publisher.publish(manifest, snapshot)
        await proxy.fleet.start()
        asker = Asker(gateway)
        await node.spawn(lambda: asker, "asker", restarts=0)
        await node.ask(sync, Publish(manifest, source), Published, timeout_s=START_TIMEOUT_S)
        while await lines.get():
            asker.open = True
            asker.idle.clear()
            await asker.more()
            await asyncio.wait_for(asker.answered.wait(), START_TIMEOUT_S)
            before, start = asker.tokens, time.perf_counter()
            await asyncio.sleep(WINDOW_S)
            rate = (asker.tokens - before) / (time.perf_counter() - start)
            asker.open = False
            await asyncio.wait_for(asker.idle.wait(), START_TIMEOUT_S)
            _tell(rate)


def _read_lines(loop: asyncio.AbstractEventLoop, put: Callable[[str], None]) -> None:
    for line in sys.stdin:
        loop.call_soon_threadsafe(put, line)


def _raise(error: BaseException) -> None:
    raise error


def _tell(rate: float) -> None:
    print(json.dumps({"rate": rate}), flush=True)


if __name__ == "__main__":
    side, place = sys.argv[1], Path(sys.argv[2])
    if side == "proxy":
        asyncio.run(proxied(place))
    else:
        {"client": client, "direct": direct}[side](place)
