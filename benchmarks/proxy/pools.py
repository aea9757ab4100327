"""A mixed pool against pools of one class, at equal cost, under both tasks at once (``workloads``).

2 H800 and 6 H20 cost 11.7 (an H800 2.85 times an H20), 12 H20 12.0 and 4 H800 11.4; seconds are scaled by what each
really costs. In the mixed pool the proxy has the declared affinity (FrozenLake to H800, mathematics to H20) and its own
judgement (``actors.proxy.routing``); static routing is the same pool, divided: each task before a proxy of its own that
has only its class. ``even``: 192 trajectories of either task, the paper's largest batch; ``math``: the load has
shifted, 64 and 320.

Every engine has the share of the memory that its task was calibrated with: FrozenLake's on H800 in the mixed pool, and
in pools of one class half of the engines have either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from benchmarks.proxy.reading import Reading
from benchmarks.proxy.virtual import EngineSpec, running
from benchmarks.proxy.workloads import FROZENLAKE, MATH, Workload
from bus.virtual_time import run

PRICES = {"H800": 2.85, "H20": 1.0}
AFFINITY = {FROZENLAKE.name: "H800", MATH.name: "H20"}
LOADS: Mapping[str, Mapping[str, int]] = {
    "even": {"frozenlake": 192, "math": 192},
    "math": {"frozenlake": 64, "math": 320},
}
TASKS = {task.name: task for task in (FROZENLAKE, MATH)}


def engines(hardware_class: str, count: int, task: Workload) -> list[EngineSpec]:
    return [EngineSpec(hardware_class=hardware_class, cache_share=task.cache_share)] * count


POOLS: Mapping[str, Sequence[EngineSpec]] = {
    "mixed": [*engines("H800", 2, FROZENLAKE), *engines("H20", 6, MATH)],
    "H20": [*engines("H20", 6, FROZENLAKE), *engines("H20", 6, MATH)],
    "H800": [*engines("H800", 2, FROZENLAKE), *engines("H800", 2, MATH)],
}


def price(pool: Sequence[EngineSpec]) -> float:
    return sum(PRICES[spec.hardware_class] for spec in pool)


def seconds(pool: Sequence[EngineSpec], load: Mapping[str, int], affinity: Mapping[str, str], seed: int = 0) -> float:
    """Virtual ones, until the last trajectory has ended; all begin at once, the tasks in turn."""

    async def main() -> float:
        async with running(pool, affinity, seed) as pools:
            loop = asyncio.get_running_loop()
            start = loop.time()
            async with asyncio.TaskGroup() as group:
                for name, count in load.items():
                    for number, turns in enumerate(TASKS[name].trajectories(count, seed)):
                        play = pools.players.play(f"{name}{number}", name, turns, 1000 * number)
                        group.create_task(play)
            return loop.time() - start

    return run(main(), seed=seed, limit_s=1e7)


def divided(load: Mapping[str, int]) -> float:
    """Each task has its class, and nothing else."""
    pool = POOLS["mixed"]
    return max(
        seconds([spec for spec in pool if spec.hardware_class == AFFINITY[name]], {name: count}, {})
        for name, count in load.items()
    )


def measure(quick: bool) -> Reading:
    """``quick``: a quarter of the trajectories."""
    rows = [f"{'load':8}" + "".join(f"{name:>10}" for name in ("mixed", "H20", "H800", "static"))]
    figures: dict[str, float] = {}
    for load, counts in LOADS.items():
        scaled = {name: count // 4 if quick else count for name, count in counts.items()}
        found = {name: seconds(pool, scaled, AFFINITY) * price(pool) for name, pool in POOLS.items()}
        found["static"] = divided(scaled) * price(POOLS["mixed"])
        per_price = {name: took / price(POOLS["mixed"]) for name, took in found.items()}
        rows.append(f"{load:8}" + "".join(f"{took:10.0f}" for took in per_price.values()))
        suffix = "" if load == "even" else f"_{load}"
        figures |= {
            f"mixed_pool_vs_h20{suffix}": found["H20"] / found["mixed"],
            f"mixed_pool_vs_h800{suffix}": found["H800"] / found["mixed"],
            f"mixed_pool_vs_static{suffix}": found["static"] / found["mixed"],
        }
    return Reading(figures, rows)
