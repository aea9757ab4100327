"""One rank's part of a checkpoint: safetensors, JSON, and an index with a checksum of each.

Invariant: what ``load_rank`` returns is, bit for bit, what ``save_rank`` was given with the same layout, or it raises
``CheckpointError`` naming the file. The index is written last, so a checkpoint that was cut short has none.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as serialise_tensors

from actors.formats import RANK_PART, FormatRefused
from actors.trainer.backends.protocol import CheckpointError

_RNG = "rng.cpu"
_CUDA_RNG = "rng.cuda"


class Layout(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who wrote a part; it can be loaded only by its like."""

    backend: str
    rank: int
    world_size: int
    arrangement: str = ""  # how the ranks share the model, where that is not by matrices alone


def save_rank(directory: Path, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write ``tensors`` and torch's random state as ``rank-NNNNN.{safetensors,json,index.json}``."""
    directory.mkdir(parents=True, exist_ok=True)
    named = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    named[_RNG] = torch.get_rng_state()
    if torch.cuda.is_available():
        named[_CUDA_RNG] = torch.cuda.get_rng_state()
    facts = {"format": RANK_PART.current, "layout": msgspec.to_builtins(layout), "torch": torch.__version__}
    stem = _stem(layout)
    content = {
        f"{stem}.safetensors": serialise_tensors(named),
        f"{stem}.json": json.dumps(facts, indent=2).encode(),
    }
    files = {name: {"bytes": len(data), "blake2b": _checksum(data)} for name, data in content.items()}
    body = json.dumps({"files": files}, indent=2)
    content[f"{stem}.index.json"] = json.dumps({"body": body, "blake2b": _checksum(body.encode())}).encode()
    for name, data in content.items():
        _write(directory / name, data)


def load_rank(directory: Path, layout: Layout, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that ``save_rank`` wrote; restores torch's random state.

    ``expected`` gives the names and shapes that the caller can take. Nothing is restored where ``CheckpointError`` is
    raised.
    """
    stem = _stem(layout)
    files = _read_index(directory / f"{stem}.index.json", layout)
    content = {name: _read_checked(directory / name, fact) for name, fact in files.items()}
    facts = json.loads(content[f"{stem}.json"])
    try:
        RANK_PART.check(facts.get("format"), directory / f"{stem}.json")
    except FormatRefused as error:
        raise CheckpointError(str(error)) from None
    if facts["layout"] != msgspec.to_builtins(layout):
        raise CheckpointError(
            f"{directory / stem}.json: written by {facts['layout']}, this is {layout}; resume with the layout that "
            "wrote it"
        )
    path = directory / f"{stem}.safetensors"
    try:
        tensors = parse_tensors(content[path.name])
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not safetensors ({error})") from None
    cpu_state, cuda_state = tensors.pop(_RNG, None), tensors.pop(_CUDA_RNG, None)
    _compare(path, tensors, expected)
    if cpu_state is not None:
        torch.set_rng_state(cpu_state)
    if cuda_state is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda_state)
    return tensors


def _stem(layout: Layout) -> str:
    return f"rank-{layout.rank:05d}"


def _checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _write(path: Path, data: bytes) -> None:
    """All of the file or none of it. Raises ``OSError`` with its name."""
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("wb", buffering=0) as file:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}; the checkpoint is incomplete") from None


def _read_index(path: Path, layout: Layout) -> dict[str, dict[str, Any]]:
    data = _read(path)
    try:
        index = json.loads(data)
        body: str = index["body"]
        intact = index["blake2b"] == _checksum(body.encode())
        files: dict[str, dict[str, Any]] = json.loads(body)["files"] if intact else {}
    except (ValueError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise CheckpointError(f"{path}: damaged (not the index that was written, {len(data)} bytes)")
    wanted = {f"{_stem(layout)}.safetensors", f"{_stem(layout)}.json"}
    if files.keys() != wanted:
        raise CheckpointError(f"{path}: lists {sorted(files)}, expected {sorted(wanted)}")
    return files


def _read_checked(path: Path, fact: dict[str, Any]) -> bytes:
    data = _read(path)
    if len(data) != fact["bytes"]:
        raise CheckpointError(f"{path}: {len(data)} bytes, {fact['bytes']} were written")
    if _checksum(data) != fact["blake2b"]:
        raise CheckpointError(f"{path}: the content has changed since it was written (checksum differs)")
    return data


def _compare(path: Path, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    if found.keys() != expected.keys():
        odd = min(found.keys() ^ expected.keys())
        where = "in the checkpoint only" if odd in found else "missing"
        raise CheckpointError(f"{path}: the state of another model: {odd} is {where}")
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"{path}: the state of another model: {name} has shape {tuple(tensor.shape)}, expected "
                f"{tuple(expected[name].shape)}"
            )
