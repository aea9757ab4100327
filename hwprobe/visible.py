"""Which of a host's GPUs the CUDA programs of an environment see.

Invariant: as in CUDA, the list of CUDA_VISIBLE_DEVICES holds indices or UUID prefixes and ends at the first entry that
matches nothing; indices are taken in PCI order, which is NVML's.
"""

from __future__ import annotations

from collections.abc import Mapping


def visible(wanted: str | None, uuids: Mapping[int, str | None]) -> list[int]:
    """Indices in the order of ``wanted`` (CUDA_VISIBLE_DEVICES; None: all), of the GPUs with these UUIDs."""
    if wanted is None:
        return list(uuids)
    seen: list[int] = []
    for entry in (part.strip() for part in wanted.split(",")):
        match = next((index for index, uuid in uuids.items() if _names(entry, index, uuid)), None)
        if match is None:
            break
        seen.append(match)
    return seen


def _names(entry: str, index: int, uuid: str | None) -> bool:
    if entry.isdecimal():
        return int(entry) == index
    return entry.startswith("GPU-") and (uuid or "").startswith(entry)
