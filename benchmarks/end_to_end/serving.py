"""Tokens per second of a vLLM engine behind our proxy, and of the same engine without it.

    proxy    two processes: proxy and asker in one, the engine's host process the other
    client   the asker in one, vLLM's core in another, between them vLLM's own client
             (``VLLM_ENABLE_V1_MULTIPROCESSING=1``: what ``vllm.LLM`` uses unless told otherwise); without a GPU vLLM
             then gives its worker a third process, so this is what users get, not an equal number of processes
    pair     two processes: the asker in one, the engine in a bare loop in the other, requests and completions on a
             socket between them, and nothing else
    direct   one process, and no message at all

Invariant: all are the same class with the same settings and requests, the engine has one thread to compute with, and
they take turns: while one is measured the others have nothing under way and wait for a line on standard input.

    python -m benchmarks.end_to_end.serving proxy|client|pair|direct DIRECTORY LOAD    (``measure`` starts them)

A side answers every line with one window's tokens per second of wall time. The same number of requests is always under
way (``bare.Load``): whenever one is answered the next is added. The client's core keeps its random weights, which cost
the same; every completion has a given length, whatever the tokens.
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
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil

from actors.core import Actor, Node, Ref, handler
from actors.core.hosting import ChildSpec
from actors.proxy.fleet import EngineFleet
from actors.proxy.messages import Accepted, Add, Finished, TrajectoryEnded
from actors.proxy.proxy import LLMProxy
from actors.telemetry import Spans
from actors.weightsync.messages import Publish, Published
from actors.weightsync.publisher import WeightPublisher
from actors.weightsync.sync import WeightSync
from benchmarks.end_to_end import bare
from benchmarks.end_to_end.bare import START_TIMEOUT_S, Load, first_version, request, tell

ROOT = Path(__file__).resolve().parents[2]


class Throughput(msgspec.Struct, frozen=True):
    """Medians over the rounds of windows."""

    rates: dict[str, float]  # side -> tokens per second
    shares: dict[str, float]  # side -> the proxy's share of it in one round: "pair" has the same number of processes
    rounds: int


def measure(
    rounds: int, directory: Path, load: Load | None = None, names: Sequence[str] = ("proxy", "client", "pair", "direct")
) -> Throughput:
    """Start these sides and let them take turns."""
    directory.mkdir(parents=True, exist_ok=True)
    sides = {name: _Side(name, directory / name, load or Load()) for name in names}
    try:
        for side in sides.values():
            side.window()  # caches, lazy initialisation
        rates = [{name: side.window() for name, side in sides.items()} for _ in range(rounds)]
    finally:
        for side in sides.values():
            side.close()
    return Throughput(
        rates={name: statistics.median(rate[name] for rate in rates) for name in sides},
        shares={name: statistics.median(rate["proxy"] / rate[name] for rate in rates) for name in sides},
        rounds=rounds,
    )


class _Side:
    """A measured process, from outside."""

    def __init__(self, name: str, directory: Path, load: Load) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._log = directory / "output.log"
        words = [sys.executable, "-m", "benchmarks.end_to_end.serving", name, str(directory)]
        words.append(msgspec.json.encode(load).decode())
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


class Asker(Actor):
    """Keeps the proxy busy as an env host does: every ADD is asked, every end is told."""

    def __init__(self, proxy: Ref, requests: int) -> None:
        self._proxy = proxy
        self._requests = requests  # to be under way
        self._added = 0
        self.tokens = 0
        self.open = False
        self.under_way = 0
        self.answered = asyncio.Event()  # something was
        self.idle = asyncio.Event()  # nothing is under way any more

    async def more(self) -> None:
        """Bring the number of requests to what it is to be."""
        while self.open and self.under_way < self._requests:
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


async def proxied(directory: Path, load: Load) -> None:
    """The engine in a process of its own behind the proxy of this one, with weights that came as they always do."""
    manifest, snapshot, _ = first_version(directory, load.shape)
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    threading.Thread(target=_read_lines, args=(loop, lines.put_nowait), daemon=True).start()
    async with Node("control") as node:
        proxy = LLMProxy({"engine-0": "cpu"}, {}, failed=_raise)
        settings = {
            "kind": "vllm",
            "policy_directory": str(directory),
            "dtype": "float32",
            "limits": msgspec.to_builtins(load.limits),
            "seed": 0,
        }
        spec = ChildSpec("engine-0", "benchmark", node.address, str(directory / "logs"), settings)
        proxy.fleet = EngineFleet(node, {"engine-0": (spec, {"OMP_NUM_THREADS": "1"})}, proxy, silence_s=60.0)
        gateway = await node.spawn(lambda: proxy, "proxy", restarts=0)
        publisher = WeightPublisher()
        source = await node.spawn(lambda: publisher, "publisher", restarts=0)
        sync = await node.spawn(lambda: WeightSync(Spans("weightsync")), "weightsync", restarts=0)
        proxy.introduce(sync)
        publisher.publish(manifest, snapshot)
        await proxy.fleet.start()
        asker = Asker(gateway, load.requests)
        await node.spawn(lambda: asker, "asker", restarts=0)
        await node.ask(sync, Publish(manifest, source), Published, timeout_s=START_TIMEOUT_S)
        while await lines.get():
            asker.open = True
            asker.answered.clear()  # the window begins with the first answer, as on the other sides
            asker.idle.clear()
            await asker.more()
            await asyncio.wait_for(asker.answered.wait(), START_TIMEOUT_S)
            before, start = asker.tokens, time.perf_counter()
            await asyncio.sleep(load.window_s)
            rate = (asker.tokens - before) / (time.perf_counter() - start)
            asker.open = False
            await asyncio.wait_for(asker.idle.wait(), START_TIMEOUT_S)
            tell(rate)


def _read_lines(loop: asyncio.AbstractEventLoop, put: Callable[[str], None]) -> None:
    for line in sys.stdin:
        loop.call_soon_threadsafe(put, line)


def _raise(error: BaseException) -> None:
    raise error


if __name__ == "__main__":
    side, place, given = sys.argv[1], Path(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=Load)
    if side == "proxy":
        asyncio.run(proxied(place, given))
    else:
        {"client": bare.client, "pair": bare.pair, "engine": bare.engine, "direct": bare.direct}[side](place, given)
