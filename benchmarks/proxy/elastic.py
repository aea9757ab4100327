"""What a batch that waits to fill costs at low load, and what the ceiling of the running batch does at high load.

One H20 and one H800, simulated, behind the real proxy; requests of one turn come at random (exponential gaps, the same
for all that are compared). At low load an answer is begun when it comes; the baseline, which is in this module only,
holds requests back until ``FILL`` are there, as the brief's does, and then sends them together.
``low_load_latency_saved``: share of the baseline's mean latency that is saved, the lesser of the two classes. At high
load all requests come at once, and the ceiling is 16, 64, and that of the class.
"""

from __future__ import annotations

import asyncio
import random
from statistics import mean, quantiles

from benchmarks.proxy.reading import Reading
from benchmarks.proxy.virtual import CEILINGS, EngineSpec, Pools, running
from benchmarks.proxy.workloads import Turn
from bus.virtual_time import run

FILL = 16
"""The brief's small batch, at its upper end."""
GAP_S = 0.5
"""Mean, at low load: about a dozen requests are under way at once."""
PROMPT, RESPONSE = 500, 400


def answers(count: int, seed: int) -> list[tuple[float, Turn]]:
    """When each is asked for, and what."""
    chance = random.Random(seed)
    at, made = 0.0, []
    for _ in range(count):
        at += chance.expovariate(1 / GAP_S)
        made.append((at, Turn(PROMPT, max(1, int(chance.uniform(0.5, 1.5) * RESPONSE)), 0.0)))
    return made


class Gates:
    """Lets requests through when as many are there as fill a batch; the last batch goes as it is."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._gates = [asyncio.Event() for _ in range(-(-count // FILL))]

    async def passed(self, number: int) -> None:
        """``number``: of the request, in the order in which they come."""
        gate = self._gates[number // FILL]
        if number % FILL == FILL - 1 or number == self._count - 1:
            gate.set()
        await gate.wait()


async def _ask(pools: Pools, number: int, at: float, turn: Turn, gates: Gates | None = None) -> float:
    """Seconds from when it comes to its answer."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(at)
    start = loop.time()
    if gates is not None:
        await gates.passed(number)
    await pools.players.play(f"t{number}", "default", [turn], 1000 * number)
    return loop.time() - start


def low_load(hardware_class: str, count: int, *, fills: bool, seed: int = 0) -> list[float]:
    """Latencies."""

    async def main() -> list[float]:
        async with running([EngineSpec(hardware_class=hardware_class)], {}, seed) as pools:
            gates = Gates(count) if fills else None
            asked = enumerate(answers(count, seed))
            return await asyncio.gather(*(_ask(pools, number, at, turn, gates) for number, (at, turn) in asked))

    return run(main(), seed=seed, limit_s=1e7)


def high_load(hardware_class: str, ceiling: int, count: int, seed: int = 0) -> tuple[float, list[float]]:
    """Seconds for all, and latencies."""

    async def main() -> tuple[float, list[float]]:
        async with running([EngineSpec(hardware_class=hardware_class, ceiling=ceiling)], {}, seed) as pools:
            loop = asyncio.get_running_loop()
            start = loop.time()
            asked = enumerate(answers(count, seed))
            found = await asyncio.gather(*(_ask(pools, number, 0.0, turn) for number, (_, turn) in asked))
            return loop.time() - start, found

    return run(main(), seed=seed, limit_s=1e7)


def measure(quick: bool) -> Reading:
    """``quick``: a quarter of the requests."""
    low, high = (64, 128) if quick else (256, 512)
    rows = [f"{'low load':10}{'mean s':>9}{'p95':>8}   fills: {'mean s':>7}{'p95':>8}{'saved':>8}"]
    saved = []
    for name in CEILINGS:
        ours, filled = (low_load(name, low, fills=fills) for fills in (False, True))
        saved.append(1 - mean(ours) / mean(filled))
        waits = f"{mean(filled):17.2f}{_p95(filled):8.2f}"
        rows.append(f"{name:10}{mean(ours):9.2f}{_p95(ours):8.2f}{waits}{saved[-1]:8.2f}")
    rows.append(f"{'high load':10}{'ceiling':>9}{'answers/s':>11}{'mean s':>9}{'p95':>8}")
    for name, most in CEILINGS.items():
        for ceiling in (FILL, 64, most):
            took_s, latencies = high_load(name, ceiling, high)
            rows.append(f"{name:10}{ceiling:9}{high / took_s:11.2f}{mean(latencies):9.1f}{_p95(latencies):8.1f}")
    return Reading({"low_load_latency_saved": min(saved)}, rows)


def _p95(values: list[float]) -> float:
    return quantiles(values, n=20)[-1]
