"""What one device does, timed: ``python -m hwprobe.torch_rates cuda|cpu fp32|bf16 [--seconds S]``; one JSON object.

Invariant: the only module here that loads torch, and only in a process of its own, which ends with the measurement and
leaves nothing allocated. A rate is that of the fastest of several rounds: what disturbs one only makes it slower.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

ROUNDS = 5
GPU_SIDE, CPU_SIDE = 8192, 1024
"""Of square matrices: large enough that the product is bound by compute (an intensity of thousands of FLOP a byte)."""
GPU_COPY, CPU_COPY = 1 << 30, 1 << 28
"""Bytes: beyond every cache."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="torch_rates")
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("dtype", choices=("fp32", "bf16"))
    parser.add_argument("--seconds", type=float, default=1.0, help="for all rounds of both figures")
    options = parser.parse_args(argv)
    print(json.dumps(rates(options.device, options.dtype, options.seconds)))
    return 0


def rates(device: str, dtype: str, seconds: float) -> dict[str, float]:
    """``flops`` of a matrix product, and ``bandwidth`` (bytes read and written a second) of a copy."""
    import torch  # noqa: PLC0415

    cuda = device == "cuda"
    wait: Callable[[], None] = torch.cuda.synchronize if cuda else _nothing
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    side, size = (GPU_SIDE, GPU_COPY) if cuda else (CPU_SIDE, CPU_COPY)
    left, right = (torch.rand(side, side, device=device).to(kind) for _ in range(2))
    product = torch.empty(side, side, dtype=kind, device=device)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    multiplied = _fastest(lambda: torch.mm(left, right, out=product), wait, seconds / 2)
    copied = _fastest(lambda: target.copy_(source), wait, seconds / 2)
    return {"flops": 2 * side**3 / multiplied, "bandwidth": 2 * size / copied}


def _fastest(work: Callable[[], Any], wait: Callable[[], None], seconds: float) -> float:
    """Seconds that one ``work`` takes. Each round repeats it long enough for the clock, the first is a rehearsal."""
    times, best = 1, float("inf")
    while True:
        taken = _time(work, wait, times)
        if taken >= seconds / ROUNDS / 2:
            break
        times *= 2
    for _ in range(ROUNDS - 1):
        best = min(best, _time(work, wait, times) / times)
    return best


def _time(work: Callable[[], Any], wait: Callable[[], None], times: int) -> float:
    wait()
    begun = time.perf_counter()
    for _ in range(times):
        work()
    wait()
    return time.perf_counter() - begun


def _nothing() -> None:
    """A CPU's work is done when it returns."""


if __name__ == "__main__":
    sys.exit(main())
