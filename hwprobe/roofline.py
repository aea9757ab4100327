"""What a device can do at best: dense FLOP/s by data type, memory bandwidth, memory; by name, from data sheets.

Invariant: every row names its source, figures are dense (data sheets print them with 2:4 sparsity, twice as high), and
a name that is not known gives ``None``, never the figures of a neighbour (an RTX 4090 Laptop is not an RTX 4090).

The ridge point (Williams, Waterman, Patterson 2009) is peak FLOP/s over bytes/s: work of a higher intensity is bound
by compute, of a lower one by memory. Prefill lies above 100 FLOP/byte, decode near its batch size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Literal

import msgspec

from hwprobe.hardware import Cpu

GIB = 1 << 30
TERA = 1e12
Kind = Literal["compute", "bandwidth"]  # what a device is better at than others of its pool
Dtype = Literal["fp32", "bf16", "fp8"]


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """One device's limits."""

    hardware_class: str
    peak_bf16_flops: float  # FLOP/s, dense; fp16 has the same
    peak_fp32_flops: float  # FLOP/s, without tensor cores
    peak_fp8_flops: float | None = None  # FLOP/s, dense; None where the device has no such unit
    bandwidth: float  # bytes/s of device memory
    memory_bytes: int  # nominal; what the driver reports is up to 6% less
    nvlink_bandwidth: float = 0.0  # bytes/s, both directions together
    source: str
    estimated: bool = False  # derived, not a published figure

    def peak(self, dtype: Dtype) -> float | None:
        """FLOP/s, dense; None where the device has no unit for it."""
        return {"fp32": self.peak_fp32_flops, "bf16": self.peak_bf16_flops, "fp8": self.peak_fp8_flops}[dtype]

    @property
    def ridge(self) -> float:
        """FLOP per byte at which compute and bandwidth limit alike, in bf16."""
        return self.peak_bf16_flops / self.bandwidth


_ROLLART = "RollArt, arXiv 2512.22560, table of evaluated GPUs; fp32 and fp8: NVIDIA H100 data sheet (SXM)"
_H20 = (
    "RollArt, arXiv 2512.22560, table of evaluated GPUs; fp32 and fp8: NVIDIA H20 product brief, as quoted by vendors"
)
_H100 = "NVIDIA H100 data sheet"
_H200 = "NVIDIA H200 data sheet"
_A100 = "NVIDIA A100 data sheet"
_H800_PCIE = "NVIDIA H800 PCIe product brief (an H100 PCIe with less NVLink)"
_H20_141 = "NVIDIA H20 (141 GB) product brief, as quoted by vendors"
_L20 = "NVIDIA L20 product brief, as quoted by vendors"
_B200 = "NVIDIA HGX B200 data sheet (1000 W)"
_ADA = "NVIDIA Ada architecture whitepaper, appendix A (with float32 accumulate)"

# Pattern in NVML's device name, class, dense TFLOP/s in bf16, fp32 and fp8 (0: none), TB/s, GiB, NVLink GB/s (both
# ways), source. The first match counts, so variants precede the plain name.
_ROWS: tuple[tuple[str, str, float, float, float, float, int, float, str], ...] = (
    (r"\bH20-3e\b", "H20", 148, 44, 296, 4.8, 141, 900, _H20_141),
    (r"\bH20\b", "H20", 148, 44, 296, 4.0, 96, 900, _H20),
    (r"\bH800 PCIe\b", "H800", 756, 51, 1513, 2.0, 80, 400, _H800_PCIE),
    (r"\bH800\b(?! NVL)", "H800", 989.5, 67, 1979, 3.35, 80, 400, _ROLLART),
    (r"\bH100 PCIe\b", "H100", 756, 51, 1513, 2.0, 80, 600, _H100 + " (PCIe)"),
    (r"\bH100 NVL\b", "H100", 835.5, 60, 1671, 3.9, 94, 600, _H100 + " (NVL)"),
    (r"\bH100\b", "H100", 989.5, 67, 1979, 3.35, 80, 900, _H100 + " (SXM)"),
    (r"\bH200 NVL\b", "H200", 835.5, 60, 1671, 4.8, 141, 900, _H200 + " (NVL)"),
    (r"\bH200\b", "H200", 989.5, 67, 1979, 4.8, 141, 900, _H200 + " (SXM)"),
    (r"\bA100-(SXM4|PCIE)-40GB\b", "A100", 312, 19.5, 0, 1.555, 40, 600, _A100 + " (40 GB)"),
    (r"\bA100 80GB PCIe\b", "A100", 312, 19.5, 0, 1.935, 80, 600, _A100 + " (PCIe 80 GB)"),
    (r"\bA100\b", "A100", 312, 19.5, 0, 2.039, 80, 600, _A100 + " (SXM 80 GB)"),
    (r"\bB200\b", "B200", 2250, 75, 4500, 8.0, 180, 1800, _B200),
    (r"\bL40S\b", "L40S", 362.05, 91.6, 733, 0.864, 48, 0, "NVIDIA L40S data sheet"),
    (r"\bL20\b", "L20", 119.5, 59.8, 239, 0.864, 48, 0, _L20),
    (r"\bRTX 4090$", "RTX4090", 165.2, 82.6, 330.3, 1.008, 24, 0, _ADA),
)
TABLE: tuple[tuple[re.Pattern[str], Roofline], ...] = tuple(
    (
        re.compile(pattern),
        Roofline(
            hardware_class=name,
            peak_bf16_flops=bf16 * TERA,
            peak_fp32_flops=fp32 * TERA,
            peak_fp8_flops=fp8 * TERA or None,
            bandwidth=terabytes * TERA,
            memory_bytes=gib * GIB,
            nvlink_bandwidth=nvlink * 1e9,
            source=source,
        ),
    )
    for pattern, name, bf16, fp32, fp8, terabytes, gib, nvlink, source in _ROWS
)

# One pool of a single class has no neighbour to be compared with: the paper's pair decides, between H20 (37 FLOP/byte)
# and H800 (295).
_PAIR_RIDGES = (148 / 4.0, 989.5 / 3.35)

# float32 FLOP per cycle and core (bf16 without matrix units is computed in float32): two FMA units of 16 and 8 lanes,
# or two of 4 (NEON); AMX does 16 x 16 x 32 multiply-adds of bf16 in 16 cycles. Intel 64 optimisation manual.
_FLOP_PER_CYCLE = {"amx_bf16": 1024, "avx512": 64, "avx2": 32, "other": 16}
_DEFAULT_HZ = 2.5e9
_CORE_BANDWIDTH = 10e9  # one core's outstanding cache misses sustain about this much
# Per socket: cautious for what may have two channels of DDR4 or twelve of DDR5; CPUs with AMX have at least eight of
# DDR5-4800 (307 GB/s).
_SOCKET_BANDWIDTH = {"amx_bf16": 300e9, "avx512": 100e9, "avx2": 100e9, "other": 50e9}


def lookup(name: str) -> Roofline | None:
    """Figures of a GPU by NVML's name, or None where the table has none."""
    return next((roofline for pattern, roofline in TABLE if pattern.search(name)), None)


def lookup_class(hardware_class: str) -> Roofline | None:
    """Figures of a class's main variant (the last of its rows), or None."""
    rows = [roofline for _, roofline in TABLE if roofline.hardware_class == hardware_class]
    return rows[-1] if rows else None


def hardware_class(name: str) -> str:
    """H800, H20, ... by NVML's name; a device that the table lacks is its own class (``NVIDIA GeForce RTX 3090`` is
    RTX3090)."""
    known = lookup(name)
    if known is not None:
        return known.hardware_class
    words = [word for word in name.split() if word not in ("NVIDIA", "GeForce", "Tesla", "Quadro", "GPU")]
    return "".join(words)[:32] or "GPU"


def estimate_cpu(cpu: Cpu, memory_bytes: int) -> Roofline:
    """The usable CPUs as one device of class CPU: an estimate from cores, clock and instruction set."""
    cores = max(1, min(cpu.physical_cores, cpu.usable))
    hz = cpu.max_hz or _DEFAULT_HZ
    return Roofline(
        hardware_class="CPU",
        peak_bf16_flops=cores * hz * _FLOP_PER_CYCLE[cpu.isa],
        peak_fp32_flops=cores * hz * _FLOP_PER_CYCLE["avx512" if cpu.isa == "amx_bf16" else cpu.isa],
        bandwidth=min(cores * _CORE_BANDWIDTH, cpu.sockets * _SOCKET_BANDWIDTH[cpu.isa]),
        memory_bytes=memory_bytes,
        source="estimate from cores, clock and instruction set",
        estimated=True,
    )


def reference_ridge(ridges: Iterable[float]) -> float:
    """The ridge point that splits a pool: the geometric mean of its lowest and highest; the paper's pair where the
    pool has fewer than two."""
    distinct = set(ridges)
    low, high = (min(distinct), max(distinct)) if len(distinct) > 1 else _PAIR_RIDGES
    return math.sqrt(low * high)


def kind(ridge: float, reference: float) -> Kind:
    """Compute-optimised from the reference ridge point on, bandwidth-optimised below."""
    return "compute" if ridge >= reference else "bandwidth"
