"""``python -m benchmarks.proxy``: the proxy before real and simulated engines, one part a question.

    python -m benchmarks.proxy                   all parts
    python -m benchmarks.proxy --parts a,b       some of them
    python -m benchmarks.proxy --quick           a look
    python -m benchmarks.proxy --json            one JSON object

Each part is a module of its own with a function ``measure(quick)``; its docstring says what is compared. Parts run one
after the other. A part whose engine or peer is not installed is named on stderr, and its figures are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping

from benchmarks.proxy import calibration, commands, elastic, pools, routing, throughput
from benchmarks.proxy.reading import NotMeasurable, Reading

PARTS: Mapping[str, Callable[[bool], Reading]] = {
    "commands": commands.measure,
    "throughput": throughput.measure,
    "routing": routing.measure,
    "calibration": calibration.measure,
    "pools": pools.measure,
    "elastic": elastic.measure,
}
"""Name -> what measures it; True: quickly."""

TARGETS: Mapping[str, str] = {
    "command_p99_ms": "< 5",
    "throughput_vs_bare_vllm_32": ">= 0.95",
    "throughput_vs_bare_vllm_128": ">= 0.95",
    "routing_us_1000_engines": "<= 50",
    "routing_us_1000_engines_p99": "",
    "calibration_frozenlake_winners": "1",
    "calibration_frozenlake_ratios": ">= 0.8",
    "calibration_frozenlake_times": ">= 0.8",
    "calibration_math_winners": "1",
    "calibration_math_ratios": ">= 0.8",
    "calibration_math_times": ">= 0.8",
    "mixed_pool_vs_h20": ">= 1.30",
    "mixed_pool_vs_h800": "> 1",
    "low_load_latency_saved": ">= 0.40",
}


def some_parts(text: str) -> list[str]:
    """Names with commas between. Raises ``argparse.ArgumentTypeError`` for one that is none."""
    names = text.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return names


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proxy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", type=some_parts, default=list(PARTS), help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before"
    readings: dict[str, Reading] = {}
    for name in arguments.parts:
        try:
            readings[name] = PARTS[name](arguments.quick)
        except NotMeasurable as missing:
            print(f"{name} is not measured: {missing}", file=sys.stderr, flush=True)
    figures = {name: value for reading in readings.values() for name, value in reading.figures.items()}
    if arguments.json:
        print(json.dumps({"figures": figures, "command": "python -m benchmarks.proxy", "machine": machine}))
        return 0
    for name, reading in readings.items():
        print("\n".join([f"# {name}", *reading.rows, ""]))
    for name, value in figures.items():
        print(f"{name:34}{value:12,.3f}   {TARGETS.get(name, '')}")
    print(machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
