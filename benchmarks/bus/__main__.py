"""How fast messages, arrays and objects travel between two processes, beside plain pyzmq, gRPC and Ray.

    python -m benchmarks.bus                all sides, 5 rounds
    python -m benchmarks.bus --quick        one round of fewer messages
    python -m benchmarks.bus --json         one JSON object

Every side is a client process with an answering process of its own, over TCP on this machine; ``common`` says what all
of them move, and by which rules. Sides take turns within a round, every other round in the opposite order; a figure
"vs" is the median of the rounds' ratios. A peer that is not installed is named, and its figures are absent.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.bus.common import BURST, OBJECT_BYTES, TENSOR_BYTES, Side, SideFailed

PEERS = {"pyzmq": "zmq", "grpc": "grpc", "ray": "ray"}
SIDES = ["ours", *PEERS]
TARGETS = {
    "round_trip_vs_pyzmq": "<= 1.6",
    "round_trip_vs_grpc_stream": "<= 0.4",
    "round_trip_vs_ray": "<= 0.25",
    "throughput_vs_pyzmq": ">= 0.6",
    "throughput_vs_ray": ">= 8",
    "tensor_bandwidth_vs_pyzmq": ">= 0.85",
    "object_vs_memcpy": ">= 0.8",
    "object_vs_ray": ">= 1.5",
    "local_ask_us": "<= 25",
    "idle_actor_bytes": "< 5000",
    "abort_behind_bulk_ms": "< 10",
}

Round = dict[str, dict[str, float]]
"""Side -> figure -> value."""


def one_round(sides: dict[str, Side], quick: bool) -> Round:
    """Every figure of every side that has it."""
    share = 10 if quick else 1
    found: Round = {name: {} for name in sides}

    def each(names: list[str], figure: str, question: str, count: int, value: Callable[[list[float]], float]) -> None:
        for name in names:
            if name in sides:
                found[name][figure] = value(sides[name].ask(question, count))

    order = list(sides)
    each(order, "round_trip_us", "round_trip", 4_000 // share, lambda seconds: statistics.median(seconds) * 1e6)
    messages = max(20_000 // share, BURST)
    each(order, "messages_per_s", "one_way", messages, lambda seconds: messages / seconds[0])
    arrays = 400 // share
    each(
        [name for name in order if name != "grpc"],
        "tensor_gb_per_s",
        "tensors",
        arrays,
        lambda seconds: arrays * TENSOR_BYTES / seconds[0] / 1e9,
    )
    objects = 40 // share
    for name in order:  # a copy beside each of ours, so that both see the same machine
        if name == "ours":
            each(["ours"], "memcpy_gb_per_s", "memcpy", objects, _object_gb_per_s)
        if name in ("ours", "ray"):
            each([name], "object_gb_per_s", "objects", objects, _object_gb_per_s)
    each(["ours"], "local_ask_us", "local", 10_000 // share, lambda seconds: seconds[0] * 1e6)
    each(["ours"], "abort_behind_bulk_ms", "abort", 1, lambda seconds: max(seconds) * 1e3)
    return found


def _object_gb_per_s(seconds: list[float]) -> float:
    return OBJECT_BYTES / statistics.median(seconds) / 1e9


def figures(rounds: list[Round], idle_actor_bytes: float) -> dict[str, float]:
    """Medians over the rounds of ratios, and of what has no peer."""

    def ratio(figure: str, peer: str) -> float | None:
        pairs = [(one["ours"][figure], one[peer][figure]) for one in rounds if figure in one.get(peer, {})]
        return statistics.median(ours / theirs for ours, theirs in pairs) if pairs else None

    found = {
        "round_trip_vs_pyzmq": ratio("round_trip_us", "pyzmq"),
        "round_trip_vs_grpc_stream": ratio("round_trip_us", "grpc"),
        "round_trip_vs_ray": ratio("round_trip_us", "ray"),
        "throughput_vs_pyzmq": ratio("messages_per_s", "pyzmq"),
        "throughput_vs_ray": ratio("messages_per_s", "ray"),
        "tensor_bandwidth_vs_pyzmq": ratio("tensor_gb_per_s", "pyzmq"),
        "object_vs_memcpy": statistics.median(
            one["ours"]["object_gb_per_s"] / one["ours"]["memcpy_gb_per_s"] for one in rounds
        ),
        "object_vs_ray": ratio("object_gb_per_s", "ray"),
        "local_ask_us": statistics.median(one["ours"]["local_ask_us"] for one in rounds),
        "abort_behind_bulk_ms": statistics.median(one["ours"]["abort_behind_bulk_ms"] for one in rounds),
        "idle_actor_bytes": idle_actor_bytes,
    }
    return {name: value for name, value in found.items() if value is not None}


def table(rounds: list[Round]) -> str:
    """Medians by side."""
    names = [
        "round_trip_us",
        "messages_per_s",
        "tensor_gb_per_s",
        "object_gb_per_s",
        "memcpy_gb_per_s",
        "local_ask_us",
        "abort_behind_bulk_ms",
    ]
    lines = [f"{'':8}" + "".join(f"{name:>22}" for name in names)]
    for side in rounds[0]:
        cells = []
        for name in names:
            values = [one[side][name] for one in rounds if name in one[side]]
            cells.append(f"{statistics.median(values):22,.2f}" if values else f"{'':22}")
        lines.append(f"{side:8}" + "".join(cells))
    return "\n".join(lines)


def run(names: list[str], count: int, *, quick: bool, directory: Path) -> tuple[list[Round], float]:
    """All rounds, and what an idle actor takes."""
    sides: dict[str, Side] = {}
    try:
        for name in names:
            sides[name] = Side(name, directory)
            sides[name].ask("round_trip", 200)  # connections, lazy imports
        idle = sides["ours"].ask("idle", 1_000 if quick else 10_000)[0]
        rounds = []
        for number in range(count):
            ordered = names if number % 2 == 0 else names[::-1]
            rounds.append(one_round({name: sides[name] for name in ordered}, quick))
            print(f"round {number + 1} of {count}", file=sys.stderr, flush=True)
        return rounds, idle
    finally:
        for side in sides.values():
            side.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.bus", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    names = ["ours"]
    for peer, module in PEERS.items():
        if importlib.util.find_spec(module) is None:
            print(f"{peer} is not measured: {module} is not installed; pip install 'rollart[bench]'", file=sys.stderr)
        else:
            names.append(peer)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before"
    try:
        with tempfile.TemporaryDirectory(prefix="rollart-bus-") as directory:
            rounds, idle = run(
                names, 1 if arguments.quick else arguments.rounds, quick=arguments.quick, directory=Path(directory)
            )
    except SideFailed as error:
        print(error, file=sys.stderr)
        return 1
    found = figures(rounds, idle)
    if arguments.json:
        print(json.dumps({"figures": found, "command": "python -m benchmarks.bus", "machine": machine}))
        return 0
    print(table(rounds))
    for name, value in found.items():
        print(f"{name:28}{value:12,.3f}   {TARGETS[name]}")
    print(machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
