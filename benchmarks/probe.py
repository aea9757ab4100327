"""How long the hardware probe takes, and what it costs, beside tools that look at the same machine.

    python -m benchmarks.probe             every command ``--rounds`` times, in turn
    python -m benchmarks.probe --json      one JSON object

``probe_ms`` is one call of ``probe`` and ``build_affinity_map`` in a process that has them loaded (the first call, and
the median of the others), ``command_ms`` a whole ``python -m hwprobe`` with the interpreter's start. Peers that are not
installed are named.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from hwprobe import build_affinity_map, probe

PEERS = {
    "lstopo": ["lstopo-no-graphics", "--of", "console"],
    "nvidia_smi_topo": ["nvidia-smi", "topo", "-m"],
    "nvitop": ["nvitop", "--once"],
}
LIMIT_S = 60.0


def look() -> None:
    build_affinity_map(probe())


def command() -> None:
    run([sys.executable, "-m", "hwprobe"])


def run(words: list[str]) -> None:
    subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=LIMIT_S, check=False)


def milliseconds(work: Callable[[], None]) -> tuple[float, float]:
    """By the clock, and of CPU in this process."""
    begun, used = time.perf_counter(), time.process_time()
    work()
    return (time.perf_counter() - begun) * 1e3, (time.process_time() - used) * 1e3


def figures(rounds: int) -> tuple[dict[str, float], list[str]]:
    """The figures, and the peers that are missing."""
    first, _ = milliseconds(look)
    here = {name: words for name, words in PEERS.items() if shutil.which(words[0])}
    taken: dict[str, list[float]] = {"probe_ms": [], "probe_cpu_ms": [], "command_ms": []}
    taken |= {f"{name}_ms": [] for name in here}
    for _ in range(rounds):
        clock, cpu = milliseconds(look)
        taken["probe_ms"].append(clock)
        taken["probe_cpu_ms"].append(cpu)
        taken["command_ms"].append(milliseconds(command)[0])
        for name, words in here.items():
            taken[f"{name}_ms"].append(milliseconds(lambda words=words: run(words))[0])  # type: ignore[misc]
    found = {"first_probe_ms": first} | {name: statistics.median(times) for name, times in taken.items()}
    return {name: round(value, 2) for name, value in found.items()}, [name for name in PEERS if name not in here]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.probe", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    found, missing = figures(options.rounds)
    if options.json:
        machine = f"{platform.machine()}, {platform.release()}"
        print(json.dumps({"figures": found, "command": "python -m benchmarks.probe", "machine": machine}))
        return 0
    for name, value in found.items():
        print(f"{name:24} {value:10.2f}")
    for name in missing:
        print(f"{name}: not installed ({PEERS[name][0]})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
