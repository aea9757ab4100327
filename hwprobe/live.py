"""``python -m hwprobe.live``: this host and its GPUs, a line a second.

Invariant: it costs what the telemetry of an engine costs, and nothing that hangs in a driver holds a line up: a GPU's
figures are then "-" until it answers.
"""

from __future__ import annotations

import argparse
import sys
import time

import msgspec

from hwprobe.host_usage import HostUsage, between, read_host_usage
from hwprobe.telemetry import GpuFigures, GpuTelemetry

GIB, MB = 1 << 30, 1e6


class Line(msgspec.Struct, frozen=True):
    """One moment; with ``--json`` one object a line."""

    time_s: float  # since the epoch
    host: HostUsage
    gpus: GpuFigures  # all that this process sees, together


def main(argv: list[str] | None = None) -> int:
    """Print lines until Ctrl-C, or as many as asked for."""
    parser = argparse.ArgumentParser(prog="live", description="Show how busy this host and its GPUs are.")
    parser.add_argument("--every", type=float, default=1.0, metavar="S", help="seconds between two lines (1)")
    parser.add_argument("--lines", type=int, default=0, metavar="N", help="end after so many (0: at Ctrl-C)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(argv)
    if not 0.05 <= options.every <= 3600:
        parser.error(f"--every: expected 0.05 to 3600 seconds, found {options.every:g}")
    telemetry = GpuTelemetry(min(1.0, options.every))
    before, printed = read_host_usage(), 0
    try:
        while not options.lines or printed < options.lines:
            time.sleep(options.every)
            now = read_host_usage()
            line = Line(time.time(), between(before, now), telemetry.take())
            before = now
            if options.json:
                print(msgspec.json.encode(line).decode(), flush=True)
            else:
                print(("" if printed % 20 else f"{head(line)}\n") + text(line), flush=True)
            printed += 1
    except KeyboardInterrupt:
        return 0
    finally:
        telemetry.stop()
    return 0


HEADER = (
    "TIME       CPU  DISK  MEMORY GiB    IN MB/s OUT MB/s LOST |  GPU   MEM  MEMORY GiB    POWER TEMP "
    "PCIE MB/s out/in  NVLINK MB/s out/in"
)


def head(line: Line) -> str:
    """Above the rows, with what they cannot hold."""
    return f"({line.gpus.missing})\n{HEADER}" if line.gpus.missing else HEADER


def text(line: Line) -> str:
    """A row below ``HEADER``."""
    host, gpus, vitals = line.host, line.gpus, line.gpus.vitals
    left = (
        f"{time.strftime('%H:%M:%S', time.localtime(line.time_s))} "
        f"{_percent(host.cpu_busy)} {_percent(host.disk_wait)} "
        f"{_gib(host.memory_used)}/{_gib(host.memory_total)} {host.received / MB:10.1f} {host.sent / MB:8.1f} "
        f"{host.lost:4d}"
    )
    if gpus.state != "measuring":
        return f"{left} | {'no GPU' if gpus.state == 'absent' else 'GPUs: no answer yet'}"
    return (
        f"{left} | {_percent(gpus.utilisation)} {_percent(vitals.memory_busy)} "
        f"{_gib(gpus.memory_used)}/{_gib(gpus.memory_total)} {_number(vitals.power_w, 'W', 7)} "
        f"{_number(vitals.temperature_c, 'C', 4)} {_rate(vitals.pcie_sent)}/{_rate(vitals.pcie_received)}"
        f"  {_rate(vitals.nvlink_sent)}/{_rate(vitals.nvlink_received)}"
    )


def _percent(share: float | None) -> str:
    return "   - " if share is None else f"{100 * share:4.0f}%"


def _gib(size: int | None) -> str:
    return "    -" if size is None else f"{size / GIB:5.1f}"


def _number(value: float | None, unit: str, width: int) -> str:
    return "-".rjust(width) if value is None else f"{value:.0f}{unit}".rjust(width)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value / MB:.1f}"


if __name__ == "__main__":
    sys.exit(main())
