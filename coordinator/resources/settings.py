"""How a job binds its processes: which CPUs they run on, and what each of a kind may use.

Invariant: nothing is limited unless the job says so; a limit that this host cannot enforce is named at start-up.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from actors.settings import Settings
from hwprobe.delegation import Share

Positive = Annotated[float, msgspec.Meta(gt=0)]
Kind = Literal["engine", "trainer", "env-worker", "reward-worker"]
GIB = 1 << 30


class ShareSettings(Settings, frozen=True):
    """Of each process of a kind; what is left out is not limited."""

    cpus: Positive | None = None  # CPU time per time
    memory_gib: Positive | None = None
    pids: Annotated[int, msgspec.Meta(gt=0)] | None = None  # processes and threads
    io_mb_s: Positive | None = None  # to and from the disk of the run directory, each

    def share(self, io_path: str) -> Share:
        return Share(
            cpus=self.cpus,
            memory_bytes=None if self.memory_gib is None else int(self.memory_gib * GIB),
            pids=self.pids,
            io_bytes_s=None if self.io_mb_s is None else int(self.io_mb_s * 1e6),
            io_path=io_path,
        )


class BindingSettings(Settings, frozen=True):
    """``binding`` of a job."""

    pin: Literal["numa", "off"] = "numa"  # to one NUMA node each, where the host has several
    limits: dict[Kind, ShareSettings] = msgspec.field(default_factory=dict)
