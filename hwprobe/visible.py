"""Which of a host's GPUs the CUDA programs of an environment see.

Invariant: as in CUDA, the list of CUDA_VISIBLE_DEVICES holds indices or UUID prefixes and ends at the first entry that
matches nothing; indices are taken in PCI order, which is NVML's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

K = TypeVar("K", bound=int | str)


def visible(wanted: str | None, uuids: Mapping[K, str | None]) -> list[K]:
    """Keys in the order of ``wanted`` (CUDA_VISIBLE_DEVICES; None: all), of the devices with these UUIDs. GPUs have
    their index as key; MIG slices, which have no index in CUDA, a name."""
    if wanted is None:
        return list(uuids)
    seen: list[K] = []
    for entry in (part.strip() for part in wanted.split(",")):
        match = next((key for key, uuid in uuids.items() if _names(entry, key, uuid)), None)
        if match is None:
            break
        seen.append(match)
    return seen


def _names(entry: str, key: int | str, uuid: str | None) -> bool:
    if entry.isdecimal():
        return isinstance(key, int) and int(entry) == key
    return entry.startswith(("GPU-", "MIG-")) and (uuid or "").startswith(entry)
