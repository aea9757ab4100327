"""Tokens per second of a vLLM engine behind the proxy, of what it makes without it, with 32 and 128 requests under way.

Beside the proxy's side (asker and proxy in one process, the engine's host the other) runs the same engine class with
the same settings in a bare loop of as many processes: ``benchmarks.end_to_end.serving`` says how, and lets them take
turns. The policy has the shape of SmolLM2-135M (random weights, float32), the smallest that the examples train; with
the one of 0.85 million parameters that the tests train a step takes a few milliseconds, so that what a message costs is
seen best: its figures end in ``_tiny``.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

from actors.policy import Qwen3Shape
from benchmarks.end_to_end.bare import Load
from benchmarks.end_to_end.serving import measure as take_turns
from benchmarks.proxy.reading import NotMeasurable, Reading

SMOLLM2 = Qwen3Shape(
    vocab_size=49152, hidden_size=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate_size=1536
)
REQUESTS = (32, 128)


def measure(quick: bool) -> Reading:
    """Raises ``NotMeasurable`` without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise NotMeasurable("vllm is not installed: bin/setup without --light")
    figures: dict[str, float] = {}
    rows = ["policy    requests  proxy tok/s  bare tok/s  share"]
    loads = [("tiny", Load(requests=32, window_s=2.0))] if quick else list(_loads())
    with tempfile.TemporaryDirectory(prefix="rollart-benchmark-") as base:
        for policy, load in loads:
            directory = Path(base) / f"{policy}-{load.requests}"
            found = take_turns(3 if quick else 5, directory, load, ("proxy", "pair"))
            share = found.shares["pair"]
            figures[f"throughput_vs_bare_vllm_{load.requests}{'_tiny' if policy == 'tiny' else ''}"] = share
            rates = found.rates
            rows.append(f"{policy:10}{load.requests:8}{rates['proxy']:13,.0f}{rates['pair']:12,.0f}{share:7.3f}")
    return Reading(figures, rows)


def _loads() -> list[tuple[str, Load]]:
    small = [("smollm2", Load(requests=count, window_s=20.0, shape=SMOLLM2)) for count in REQUESTS]
    return small + [("tiny", Load(requests=count)) for count in REQUESTS]
