"""How close simulated H800 and H20 come to what the paper measured: a batch's rollout on 2 H800 and on 6 H20.

The real proxy before simulated engines, one on each device, all trajectories at once until the last has ended. Targets:
the right winner everywhere, 4 of 5 ratios within 20% for each task, 8 of 10 times within 25%. What was fitted, and to
what, is in ``workloads``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from benchmarks.proxy.reading import Reading
from benchmarks.proxy.virtual import EngineSpec, running
from benchmarks.proxy.workloads import FROZENLAKE, MATH, Workload
from bus.virtual_time import run

BATCHES = (64, 96, 128, 160, 192)
DEVICES = {"H800": 2, "H20": 6}
MEASURED: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "frozenlake": {"H800": (47, 71, 76, 130, 190), "H20": (62, 72, 142, 230, 353)},
    "math": {"H800": (152, 210, 290, 360, 435), "H20": (121, 128, 151, 178, 227)},
}
"""Seconds, by batch: the paper's figure, digitised."""
TIME_WITHIN, RATIO_WITHIN = 0.25, 0.20


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """One task: how many of the paper's points are met."""

    winners: int  # of the batches
    ratios: int  # H20 over H800
    times: int  # of twice as many


def seconds(task: Workload, hardware_class: str, batch: int, seed: int = 0) -> float:
    """Virtual ones, until the last trajectory has ended."""

    async def main() -> float:
        spec = EngineSpec(hardware_class=hardware_class, cache_share=task.cache_share)
        async with running([spec] * DEVICES[hardware_class], {}, seed) as pools:
            loop = asyncio.get_running_loop()
            start = loop.time()
            async with asyncio.TaskGroup() as group:
                for number, turns in enumerate(task.trajectories(batch, seed)):
                    group.create_task(pools.players.play(f"t{number}", task.name, turns, 1000 * number))
            return loop.time() - start

    return run(main(), seed=seed, limit_s=1e7)


def compare(measured: Mapping[str, Sequence[float]], found: Mapping[str, Sequence[float]]) -> Fit:
    """Both by class, with batches in the same order."""
    pairs = [(m, f) for name in measured for m, f in zip(measured[name], found[name], strict=True)]
    ratios = [
        (h20 / h800, ours_h20 / ours_h800)
        for h800, h20, ours_h800, ours_h20 in zip(
            measured["H800"], measured["H20"], found["H800"], found["H20"], strict=True
        )
    ]
    return Fit(
        winners=sum((m > 1) == (f > 1) for m, f in ratios),
        ratios=sum(abs(f / m - 1) <= RATIO_WITHIN for m, f in ratios),
        times=sum(abs(f / m - 1) <= TIME_WITHIN for m, f in pairs),
    )


def measure(quick: bool) -> Reading:
    """``quick``: three batches of five."""
    rows = [f"{'':12}{'batch':>6}{'H800 s':>9}{'paper':>7}{'H20 s':>9}{'paper':>7}{'H20/H800':>10}{'paper':>7}"]
    figures: dict[str, float] = {}
    for task in (FROZENLAKE, MATH):
        batches = BATCHES[::2] if quick else BATCHES
        found = {name: [seconds(task, name, batch) for batch in batches] for name in DEVICES}
        measured = {name: [MEASURED[task.name][name][BATCHES.index(batch)] for batch in batches] for name in DEVICES}
        for place, batch in enumerate(batches):
            h800, h20 = found["H800"][place], found["H20"][place]
            m800, m20 = measured["H800"][place], measured["H20"][place]
            rows.append(
                f"{task.name:12}{batch:6}{h800:9.0f}{m800:7}{h20:9.0f}{m20:7}{h20 / h800:10.2f}{m20 / m800:7.2f}"
            )
        fit = compare(measured, found)
        figures |= {
            f"calibration_{task.name}_winners": fit.winners / len(batches),
            f"calibration_{task.name}_ratios": fit.ratios / len(batches),
            f"calibration_{task.name}_times": fit.times / (2 * len(batches)),
        }
    return Reading(figures, rows)
