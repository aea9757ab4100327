"""What it costs to watch eight GPUs and the host once a second.

    python -m benchmarks.telemetry                  30 seconds
    python -m benchmarks.telemetry --quick          5 seconds
    python -m benchmarks.telemetry --json           one JSON object

Without a GPU the NVML library is the tests' (built here with gcc): the Python bindings and everything above them are
real, the driver's own part is not in it. Where this machine has GPUs, ``--real`` watches those.

Figures are CPU time over wall time, in per cent of one core: of the sampling thread (its own clock), and of the whole
process beside an equal one that samples nothing. Looking at the host is timed by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
GPUS = 8
TARGET_PERCENT = 0.5

CHILD = """
import json, sys, threading, time
from hwprobe.host_usage import between, read_host_usage
from hwprobe.telemetry import GpuTelemetry

seconds, watch = float(sys.argv[1]), sys.argv[2] == "watch"
telemetry = GpuTelemetry(1.0) if watch else None
time.sleep(1.5)  # the driver has answered
thread = next((one for one in threading.enumerate() if one.name == "gpu-telemetry"), None)
if watch and thread is None:
    sys.exit("there is no GPU to watch")
clock = None if thread is None else time.pthread_getcpuclockid(thread.ident)
threads, before = (0.0 if clock is None else time.clock_gettime(clock)), read_host_usage()
started, used, sampled = time.monotonic(), time.process_time(), 0
if telemetry is not None:
    telemetry.take()
for _ in range(int(seconds)):
    time.sleep(1.0)
    if telemetry is not None:
        figures = telemetry.take()
        sampled += figures.samples
wall, used = time.monotonic() - started, time.process_time() - used
thread_s = 0.0 if clock is None else time.clock_gettime(clock) - threads
host = time.thread_time()
for _ in range(50):
    between(before, read_host_usage())
host = (time.thread_time() - host) / 50
devices = 0 if telemetry is None else len(figures.devices)
print(json.dumps([wall, used, thread_s, sampled, devices, host]))
"""


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """Of one process."""

    wall_s: float
    used_s: float  # CPU time of the process
    thread_s: float  # of the sampling thread
    samples: int
    devices: int
    host_s: float  # CPU time of one look at the host


class BenchmarkFailed(RuntimeError):
    """Nothing could be measured; one line for the user."""


def measure(seconds: float, watch: bool, library: Path | None) -> Reading:
    """Run one process to its end. Raises ``BenchmarkFailed``."""
    environ = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    environ |= {"PYTHONPATH": str(ROOT)}
    if library is not None:
        environ |= {
            "LD_LIBRARY_PATH": str(library),
            "FAKE_NVML_GPUS": ";".join(["NVIDIA H800|81559"] * GPUS),
            "FAKE_NVML_BUSY": ",".join(["90"] * GPUS),
            "FAKE_NVML_TRAFFIC": "138:4000000;139:2000000;197:1000000000;198:3000000000",
        }
    command = [sys.executable, "-c", CHILD, str(seconds), "watch" if watch else "idle"]
    done = subprocess.run(command, env=environ, capture_output=True, timeout=seconds + 120, check=False)
    if done.returncode != 0:
        raise BenchmarkFailed(done.stderr.decode().strip().splitlines()[-1])
    return msgspec.json.decode(done.stdout, type=Reading)


def build(folder: Path) -> Path:
    """The tests' NVML. Raises ``BenchmarkFailed``."""
    source = ROOT / "tests" / "hwprobe" / "fake_nvml.c"
    command = ["gcc", "-std=gnu11", "-O1", "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(source)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        raise BenchmarkFailed("gcc is not installed, and it takes one to build the tests' NVML") from None
    if done.returncode != 0:
        raise BenchmarkFailed(f"gcc: {done.stderr.strip()}")
    return folder


def main() -> int:
    """Measure, print, and return 1 where the target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.telemetry", description="What telemetry costs.")
    parser.add_argument("--quick", action="store_true", help="5 seconds instead of 30")
    parser.add_argument("--real", action="store_true", help="watch this machine's GPUs instead of made-up ones")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    seconds = 5.0 if options.quick else 30.0
    try:
        with tempfile.TemporaryDirectory() as folder:
            library = None if options.real else build(Path(folder))
            watching, idle = measure(seconds, True, library), measure(seconds, False, library)
    except BenchmarkFailed as error:
        print(f"telemetry: {error}", file=sys.stderr)
        return 2
    thread = 100 * watching.thread_s / watching.wall_s
    figures = {
        "telemetry_thread_percent": round(thread, 4),
        "telemetry_process_percent": round(100 * (watching.used_s / watching.wall_s - idle.used_s / idle.wall_s), 4),
        "host_look_percent": round(100 * watching.host_s, 4),
        "samples_per_s": round(watching.samples / watching.wall_s, 3),
        "gpus": watching.devices,
    }
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}"
    if options.json:
        print(json.dumps({"figures": figures, "command": "python -m benchmarks.telemetry", "machine": machine}))
    else:
        print(machine)
        for name, value in figures.items():
            print(f"{name:<28} {value:g}")
        print(f"target: below {TARGET_PERCENT:g}% of one core for {watching.devices} GPUs and the host, once a second")
    return int(thread + figures["host_look_percent"] >= TARGET_PERCENT)


if __name__ == "__main__":
    sys.exit(main())
