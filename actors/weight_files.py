"""The safetensors files of a Hugging Face model directory, looked at without reading the weights or loading torch.

Invariant: what passes ``check_weight_files`` is complete: every file that the index names is there, is as long as its
own header says, and holds the tensors that the index expects in it.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from actors.policy import PolicyError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100_000_000
"""Bytes; safetensors itself refuses longer headers."""


def weight_files(directory: Path) -> dict[Path, set[str] | None]:
    """Each weight file and the names it must hold (None: whatever it holds). Raises ``PolicyError``."""
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file():
        return {single: None}
    if not index.is_file():
        raise PolicyError(f"{directory}: neither {SINGLE} nor {INDEX} is there (other formats are not read)")
    files: dict[Path, set[str]] = {}
    try:
        for name, file in json.loads(index.read_text())["weight_map"].items():
            files.setdefault(directory / file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PolicyError(f"{index}: not an index of weights ({type(error).__name__}: {error})") from None
    for path in files:
        if not path.is_file():
            raise PolicyError(f"{path}: no such file, but {INDEX} names it; download the missing shard")
    return dict(files)


def check_weight_files(directory: Path) -> None:
    """Read every file's header and compare it with the file's length. Raises ``PolicyError``."""
    for path, names in weight_files(directory).items():
        header, start = _header(path)
        missing = (names or set()) - header.keys()
        if missing:
            raise PolicyError(f"{path}: {min(missing)} is not in it, but {INDEX} says so")
        _check_length(path, header, start)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header (https://huggingface.co/docs/safetensors: its length in 8 bytes, then JSON), and where it ends."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _HEADER_LIMIT:
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError(f"its header is {type(header).__name__}, not an object")
    except (OSError, ValueError, struct.error) as error:
        raise PolicyError(f"{path}: not a safetensors file ({error}); download it again") from None
    return header, 8 + length


def _check_length(path: Path, header: dict[str, Any], start: int) -> None:
    try:
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = start + max(ends, default=0)
    except (KeyError, TypeError, IndexError) as error:
        raise PolicyError(f"{path}: not a safetensors file (header: {error!r}); download it again") from None
    found = path.stat().st_size
    if found != expected:
        raise PolicyError(
            f"{path}: not a complete safetensors file: expected {expected} bytes by its own header, found {found}; "
            "download it again"
        )
