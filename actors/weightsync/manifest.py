"""Proof that a version of the weights has arrived: what was sent, what was loaded, and how the two are compared.

Invariant: an engine serves version n only after ``verify`` accepted its receipt for n: the same tensors by name and
digest (taken where the engine loads them), and the same log-probabilities on a canary sequence as the trainer's.
The digests prove arrival; the canary proves effect (a loader that drops a tensor or leaves a tied head stale passes
the first and fails the second).
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest accepted difference of one canary log-probability, nats, by dtype of the weights. Engines in float32
agree with the trainer to about 1e-5; in bfloat16 differences of 0.12-0.18 are normal; a stale head is off by nats."""


class TensorFact(msgspec.Struct, frozen=True):
    """One tensor of a version."""

    dtype: str  # torch's name without the prefix, e.g. "float32"
    shape: tuple[int, ...]
    digest: str


class Manifest(msgspec.Struct, frozen=True):
    """What the trainer published as ``version``."""

    version: int
    dtype: str
    tensors: dict[str, TensorFact]
    canary: np.ndarray  # int32 [T], token ids
    canary_logprobs: np.ndarray  # float32 [T-1]


class Receipt(msgspec.Struct, frozen=True):
    """What an engine holds after it loaded ``version``."""

    version: int
    engine: str
    digests: dict[str, str]
    canary_logprobs: np.ndarray  # float32 [T-1]


class ReceiptRefused(RuntimeError):
    """An engine does not hold the version that it should; the message says in what it differs."""


def size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense tensor."""
    widths = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
    if dtype not in widths:
        raise ValueError(f"tensors of {dtype} cannot be published; known are {', '.join(widths)}")
    return widths[dtype] * int(np.prod(shape, dtype=np.int64))


def digest(data: bytes | memoryview) -> str:
    """SHA-256 of a tensor's bytes (row-major, little-endian), as hex. Every byte of a version is digested at least
    twice, and today's processors have instructions for SHA-256: half the time of BLAKE2b."""
    return hashlib.sha256(data).hexdigest()


def canary_difference(manifest: Manifest, receipt: Receipt) -> float:
    """By how many nats the canary's log-probabilities are off, at most; both must be of one length."""
    return float(np.abs(receipt.canary_logprobs - manifest.canary_logprobs).max())


def verify(manifest: Manifest, receipt: Receipt) -> None:
    """Accept the receipt or raise ``ReceiptRefused``."""
    where = f"engine {receipt.engine}, version {manifest.version}"
    if receipt.version != manifest.version:
        raise ReceiptRefused(f"{where}: the receipt is for version {receipt.version}")
    missing = sorted(manifest.tensors.keys() - receipt.digests.keys())
    if missing:
        raise ReceiptRefused(f"{where}: {len(missing)} tensors were not loaded, first {missing[0]}")
    foreign = sorted(receipt.digests.keys() - manifest.tensors.keys())
    if foreign:
        raise ReceiptRefused(f"{where}: {len(foreign)} tensors are not in the manifest, first {foreign[0]}")
    wrong = sorted(name for name, fact in manifest.tensors.items() if receipt.digests[name] != fact.digest)
    if wrong:
        raise ReceiptRefused(f"{where}: {len(wrong)} tensors differ from what was published, first {wrong[0]}")
    if receipt.canary_logprobs.shape != manifest.canary_logprobs.shape:
        raise ReceiptRefused(
            f"{where}: the canary has {receipt.canary_logprobs.shape} log-probabilities, "
            f"expected {manifest.canary_logprobs.shape}"
        )
    difference = canary_difference(manifest, receipt)
    tolerance = CANARY_TOLERANCE[manifest.dtype]
    if not difference <= tolerance:  # written so that NaN is refused
        raise ReceiptRefused(
            f"{where}: every tensor arrived, but the canary's log-probabilities are off by {difference:.3g} nats "
            f"(at most {tolerance:g} is accepted): the engine does not compute with what it was given"
        )
