"""A Ray actor on a cluster of this one machine, called from its driver.

python -m benchmarks.bus.ray_side
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import numpy as np
import ray

from benchmarks.bus.common import BURST, OBJECT_BYTES, OBJECTS_FIRST, WINDOW, Sample, answer, tensor


class Echo:
    """Answers what the other sides' servers answer."""

    def __init__(self) -> None:
        self._count = 0

    def echo(self, message: Sample) -> Sample:
        return message

    def once(self, message: Sample) -> None:
        self._count += 1

    def how_many(self) -> int:
        return self._count

    def take(self, values: Any) -> int:
        return int(values.nbytes)


def main() -> None:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        object_store_memory=1 << 30,
        _node_ip_address="127.0.0.1",
    )
    echo: Any = ray.remote(Echo).remote()
    sample, array = Sample(), tensor()
    large = np.arange(OBJECT_BYTES // 4, dtype=np.float32)

    def round_trip(count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            ray.get(echo.echo.remote(sample))
            seconds.append(time.perf_counter() - start)
        return seconds

    def one_way(count: int) -> list[float]:
        start = time.perf_counter()
        for _ in range(count // BURST):
            for _ in range(BURST):
                echo.once.remote(sample)
            ray.get(echo.how_many.remote())
        return [time.perf_counter() - start]

    def tensors(count: int) -> list[float]:
        start = time.perf_counter()
        waiting: list[Any] = []
        for _ in range(count):
            if len(waiting) == WINDOW:
                ray.get(waiting.pop(0))
            waiting.append(echo.take.remote(array))
        ray.get(waiting)
        return [time.perf_counter() - start]

    def objects(count: int) -> list[float]:
        """What an actor gets as an argument it maps, without a copy."""
        seconds = []
        for _ in range(count + OBJECTS_FIRST):
            start = time.perf_counter()
            ray.get(echo.take.remote(ray.put(large)))
            seconds.append(time.perf_counter() - start)
        return seconds[OBJECTS_FIRST:]

    answer({"round_trip": round_trip, "one_way": one_way, "tensors": tensors, "objects": objects})
    ray.shutdown()


if __name__ == "__main__":
    main()
