"""What was found on one GPU, as plain facts.

Invariant: a figure that the driver did not give is ``None``, and there is a ``Finding`` that says why; a link or a
process that is not there is absent. Frequencies are hertz, powers watts, sizes bytes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PathLevel = Literal["INT", "PIX", "PXB", "PHB", "NODE", "SYS"]
"""What lies between two devices, as ``nvidia-smi topo -m`` calls it: one board, one PCIe switch, several, the host
bridge, one NUMA node, several nodes."""

ThrottleReason = Literal[
    "applications_clocks",  # somebody has set lower clocks
    "power_cap",  # at its power limit: normal under full load
    "hardware_slowdown",  # the board halves its clocks, or worse
    "sync_boost",
    "thermal",  # the driver lowers clocks for heat
    "hardware_thermal",  # the board does
    "power_brake",  # the power supply asks for it
    "display_clocks",
]


class Clocks(msgspec.Struct, frozen=True, kw_only=True):
    """Of this moment, and the highest that the board allows."""

    sm_hz: float | None = None
    sm_max_hz: float | None = None
    memory_hz: float | None = None
    memory_max_hz: float | None = None


class Power(msgspec.Struct, frozen=True, kw_only=True):
    draw_w: float | None = None
    limit_w: float | None = None  # that is enforced now
    default_w: float | None = None  # the board's own


class Ecc(msgspec.Struct, frozen=True, kw_only=True):
    """Error correction of the memory; counts since the driver was loaded."""

    enabled: bool
    corrected: int | None = None
    uncorrected: int | None = None
    remap_pending: bool | None = None  # a row is replaced at the next reset
    remap_failed: bool | None = None  # there was none left to replace it with


class PcieLink(msgspec.Struct, frozen=True, kw_only=True):
    """Now, and what device and slot could do; an idle link runs at a lower generation, at its full width."""

    generation: int | None = None
    width: int | None = None
    max_generation: int | None = None
    max_width: int | None = None


class GpuProcess(msgspec.Struct, frozen=True):
    """A process that computes on the GPU; its number is the host's, which a container may not know."""

    pid: int
    memory_bytes: int | None


class GpuSlice(msgspec.Struct, frozen=True, kw_only=True):
    """A MIG device: a share of a GPU that CUDA programs see as one."""

    index: int  # its place on the GPU; there may be holes
    name: str  # with its profile at the end: ... MIG 3g.40gb
    uuid: str | None = None
    memory_bytes: int | None = None
    sms: int | None = None

    @property
    def profile(self) -> str:
        return self.name.rpartition(" ")[2]


class GpuPath(msgspec.Struct, frozen=True, kw_only=True):
    """The way to another GPU of the host."""

    peer: int
    level: PathLevel | None = None  # without NVLink
    nvlinks: int = 0  # that lead there, directly or through a switch
    p2p: bool | None = None  # whether one may read the other's memory
    reason: str = ""  # why it may not


class NicPath(msgspec.Struct, frozen=True):
    """How far a network interface is."""

    nic: str
    level: PathLevel


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What a device was measured to do."""

    flops: float  # FLOP/s in a large matrix product
    dtype: Literal["bf16", "fp32"]
    bandwidth: float  # bytes/s, read and written, in a large copy


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU that answers. ``index`` is NVML's (PCI order), which holes of lost or hidden GPUs do not shift."""

    index: int
    name: str
    uuid: str | None = None
    memory_bytes: int | None = None
    pci_bus_id: str | None = None  # as in sysfs: 0000:18:00.0
    numa_node: int | None = None
    cpus: str | None = None  # CPUs near it, before what this process may use
    sms: int | None = None
    compute_capability: str | None = None  # 9.0
    clocks: Clocks = Clocks()
    power: Power = Power()
    temperature_c: int | None = None
    throttled_by: tuple[ThrottleReason, ...] | None = None
    ecc: Ecc | None = None
    pcie: PcieLink = PcieLink()
    nvlinks: int = 0  # active links
    nvlink_peers: tuple[int, ...] = ()  # indices of GPUs reached by NVLink, directly or through a switch
    paths: tuple[GpuPath, ...] = ()  # to each other GPU that answers
    nic_paths: tuple[NicPath, ...] = ()  # to interfaces on the PCI bus, nearest first
    mig: bool | None = None
    slices: tuple[GpuSlice, ...] = ()
    processes: tuple[GpuProcess, ...] | None = None
    measured: Rates | None = None

    @property
    def devices(self) -> tuple[str, ...]:
        """Names under which it is in the affinity map: gpu3, or gpu3.0 and gpu3.1 where it is split into slices."""
        return tuple(f"gpu{self.index}.{one.index}" for one in self.slices) or (f"gpu{self.index}",)
