"""What a real job writes into its metadata store, and when; and the same for so many GPUs.

    python -m benchmarks.coordinator.trace      run the quick start and write trace.json anew

Scaling: every host of 8 GPUs runs one such job of its own, begun at a time of its own, over and over. The recorded job
is the busiest kind: its model is tiny, so it publishes a version every fraction of a second where a real one takes
minutes, and each version is a write.
"""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from coordinator.metadata import open_store
from coordinator.metadata.protocol import MetadataStore

FILE = Path(__file__).with_name("trace.json")
JOB_S = 36.7
"""How long the recorded job takes on a quiet machine (docs/benchmarks.md): the one that recorded it was busy and took
longer, so the times are pressed together."""
GPUS_A_HOST = 8


class Written(msgspec.Struct, frozen=True):
    """One write. ``path`` has the job's name as ``JOB``."""

    at_s: float  # since the store was opened
    path: str
    size: int  # bytes
    ephemeral: bool


class Trace(msgspec.Struct, frozen=True):
    """All of a job's."""

    seconds: float
    reads: int
    writes: list[Written]


class Arrival(msgspec.Struct, frozen=True):
    """A write that is due."""

    at_s: float
    path: str
    size: int


def load() -> Trace:
    found = msgspec.json.decode(FILE.read_bytes(), type=Trace)
    share = min(1.0, JOB_S / found.seconds)
    writes = [msgspec.structs.replace(written, at_s=written.at_s * share) for written in found.writes]
    return Trace(found.seconds * share, found.reads, writes)


def jobs_of(gpus: int) -> int:
    return gpus // GPUS_A_HOST


def rate(trace: Trace, gpus: int) -> float:
    """Writes a second."""
    return len(trace.writes) / trace.seconds * jobs_of(gpus)


def paths(trace: Trace, gpus: int) -> list[str]:
    """All that are ever written."""
    names = sorted({written.path for written in trace.writes})
    return [_named(path, job) for job in range(jobs_of(gpus)) for path in names]


def arrivals(trace: Trace, gpus: int, seconds: float, seed: int) -> list[Arrival]:
    """In the order of time."""
    chance = random.Random(seed)
    found: list[Arrival] = []
    for job in range(jobs_of(gpus)):
        found += _of_one(trace, job, chance.uniform(0, trace.seconds), seconds)
    return sorted(found, key=lambda arrival: arrival.at_s)


def _of_one(trace: Trace, job: int, begun: float, seconds: float) -> Iterator[Arrival]:
    for turn in range(-1, int(seconds / trace.seconds) + 2):
        for written in trace.writes:
            at = turn * trace.seconds + begun + written.at_s
            if 0 <= at < seconds:
                yield Arrival(at, _named(written.path, job), written.size)


def _named(path: str, job: int) -> str:
    return path.replace("JOB", f"bench-{job:04}")


# ---- recording -------------------------------------------------------------------------------------------------------


class _Recorder:
    """A store that notes what is written."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._opened = time.monotonic()
        self.reads = 0
        self.writes: list[Written] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _note(self, path: str, value: bytes, ephemeral: bool) -> None:
        named = re.sub(r"^/jobs/[^/]+", "/jobs/JOB", path)
        named = re.sub(r"^/members/[^.]+", "/jobs/JOB/members", named)  # home, for whoever shards: here it is spread
        self.writes.append(Written(round(time.monotonic() - self._opened, 3), named, len(value), ephemeral))

    async def get(self, path: str) -> Any:
        self.reads += 1
        return await self._store.get(path)

    async def create(self, path: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        made = await self._store.create(path, value, ephemeral=ephemeral, sequential=sequential)
        self._note(path, value, ephemeral)
        return made

    async def write(self, path: str, value: bytes, *, expected: int | None = None) -> int:
        version = await self._store.write(path, value, expected=expected)
        self._note(path, value, ephemeral=False)
        return version

    def trace(self) -> Trace:
        return Trace(round(time.monotonic() - self._opened, 3), self.reads, self.writes)


def record(arguments: Sequence[str]) -> Trace:
    """Train in this process."""
    from coordinator.commands import train  # noqa: PLC0415  (its imports are not needed to replay)

    opened: list[_Recorder] = []

    async def recorded(*args: Any, **kwargs: Any) -> Any:
        opened.append(_Recorder(await open_store(*args, **kwargs)))
        return opened[-1]

    with mock.patch("coordinator.telling.open_store", recorded):
        status = train.main(list(arguments))
    if status != 0 or not opened:
        raise RuntimeError(f"train {' '.join(arguments)} ended with {status}; expected 0")
    return opened[-1].trace()


if __name__ == "__main__":
    found = record(sys.argv[1:] or ["examples/frozenlake.yaml"])
    lines = ",\n".join(msgspec.json.encode(written).decode() for written in found.writes)
    FILE.write_text(f'{{"seconds":{found.seconds},"reads":{found.reads},"writes":[\n{lines}\n]}}\n')
    print(f"{len(found.writes)} writes and {found.reads} reads in {found.seconds:.1f} s: {FILE}")
