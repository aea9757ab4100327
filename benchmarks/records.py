"""How much smaller records of real trajectories are than their plain form, and what it costs to write and read them.

    python -m benchmarks.records FILE ...          files of trajectories: of a run's store, a checkpoint or a dump
    python -m benchmarks.records FILE ... --json   one JSON object

The plain form is int64 ids and a float32 a token for each of mask, log-probability, version and allowed set, with the
rest of the trajectory as in a message; the narrow form leaves versions and allowed sets out. A figure is the median of
all records in a file, beside it the worst. Times are CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import msgspec
import numpy as np

from actors.trainer.coding import decode, encode
from actors.trainer.store import read_records
from actors.trajectory import Trajectory
from bus.codec import dumps

PLAIN, NARROW = 24, 16
"""Bytes a token."""


class Reading(msgspec.Struct, frozen=True):
    """Of one file."""

    file: str
    records: int
    tokens: float  # a record's mean
    record_size_ratio: float  # the median
    worst: float
    narrow_ratio: float
    encode_us: float  # a token
    decode_us: float


def measure(path: Path) -> Reading:
    """Raises ``StoreCorrupt`` or ``OSError``; ``ValueError`` for a file without trajectories."""
    trajectories = [trajectory for trajectory, _ in read_records(path)]
    if not trajectories:
        raise ValueError(f"{path}: there is no trajectory in it")
    start = time.process_time()
    records = [encode(each) for each in trajectories]
    encoded = time.process_time()
    for record in records:
        decode(record)
    decoded = time.process_time()
    tokens = np.array([_tokens(each) for each in trajectories])
    rest = np.array([_rest(each) for each in trajectories])
    sizes = np.array([len(record) for record in records])
    plain, narrow = (rest + PLAIN * tokens) / sizes, (rest + NARROW * tokens) / sizes
    return Reading(
        file=str(path),
        records=len(records),
        tokens=float(tokens.mean()),
        record_size_ratio=float(np.median(plain)),
        worst=float(plain.min()),
        narrow_ratio=float(np.median(narrow)),
        encode_us=(encoded - start) / float(tokens.sum()) * 1e6,
        decode_us=(decoded - encoded) / float(tokens.sum()) * 1e6,
    )


def _tokens(trajectory: Trajectory) -> int:
    return sum(segment.tokens.size for segment in trajectory.segments)


def _rest(trajectory: Trajectory) -> int:
    """Bytes of a message of all that is not an array of tokens."""
    return len(dumps(msgspec.structs.replace(trajectory, segments=[])))


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    readings = [measure(path) for path in arguments.files]
    if arguments.json:
        figure = min(reading.record_size_ratio for reading in readings)
        figures = {"record_size_ratio": round(figure, 3)}
        print(json.dumps({"figures": figures, "files": msgspec.to_builtins(readings)}, indent=2))
        return
    for each in readings:
        print(
            f"{each.record_size_ratio:.2f}x (worst {each.worst:.2f}x; narrow form {each.narrow_ratio:.2f}x)  "
            f"{each.records} records of {each.tokens:.0f} tokens; a token takes {each.encode_us:.2f} us to write, "
            f"{each.decode_us:.2f} to read  {each.file}"
        )


if __name__ == "__main__":
    main()
