"""How a trajectory is written down in the trainer's store: a fraction of what its arrays take.

Invariant: what is read back is what was written, bit for bit, but for the log-probabilities of sampled tokens, which
come back within ``LOGPROB_ERROR`` nats of what they were: a ratio between policies within a factor of 1 +- 1.53e-5, a
sixth of what an engine and the trainer may differ by. What was read back is written and read again without any change,
so a step on a batch and a later one on its record see the same numbers.

    record   (size of the body, the body deflated, the lowest plane of the log-probabilities)
    body     head, lengths of segments, sets of allowed tokens, ids, runs, log-probabilities

Integers are split into the planes of their bytes, those above the highest that is used left out. Mask, version and
allowed set change only where a turn begins or ends: they are written once a run. A log-probability is a multiple of
2^-15 nats; a record in which one is not finite, or belongs to a token that was not sampled, keeps all of them exactly.
The lowest plane of those multiples is noise, which deflating would only lengthen.

There is nothing in a record that eight bits with a scale a block (MXFP8) could hold within that bound: beside ids there
is one number a sampled token.
"""

from __future__ import annotations

import zlib

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors.trajectory import Segment, Trajectory

STEPS_PER_NAT = 1 << 15
LOGPROB_ERROR = 0.5 / STEPS_PER_NAT
"""Nats by which a log-probability may come back changed."""

MOST_NATS = 256.0
"""Below it every multiple of a step is a float32."""

MOST_BYTES = 1 << 31
"""Of a body: what claims to be larger is damaged."""


class NotCoded(ValueError):
    """Bytes that are no trajectory; the message says why."""


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """All of a trajectory but its arrays."""

    ticket: str
    group: int
    task: int
    initiating_version: int
    temperature: float
    turns: int
    env_return: float
    reward: float
    success: bool
    transcript: list[tuple[str, str]]
    stream: str


class _Body(msgspec.Struct, frozen=True, array_like=True):
    """Arrays are packed: see ``_packed``. Those of all segments are joined."""

    head: _Head
    lengths: bytes  # of segments
    sets: list[bytes]  # ascending ids, each less the one before
    tokens: bytes
    run_lengths: bytes
    run_masks: bytes
    run_versions: bytes  # + 1, as the next
    run_allowed: bytes
    exact: bool  # whether log-probabilities are the float32 of all tokens, or multiples, of sampled ones
    most: int  # the smallest multiple, which the others are counted from
    logprobs: bytes  # without their lowest plane


class _Record(msgspec.Struct, frozen=True, array_like=True):
    size: int
    body: bytes
    noise: bytes


_ENCODER = msgspec.msgpack.Encoder()
_RECORD = msgspec.msgpack.Decoder(_Record)
_BODY = msgspec.msgpack.Decoder(_Body)
_EMPTY = np.zeros(0, np.int64)


def encode(trajectory: Trajectory) -> bytes:
    """See the module docstring."""
    tokens, mask, logprobs, versions, allowed = (
        np.concatenate([getattr(segment, name) for segment in trajectory.segments] or [_EMPTY])
        for name in ("tokens", "loss_mask", "logprobs", "versions", "allowed")
    )
    starts = _starts(mask, versions, allowed)
    multiples = _multiples(logprobs, mask)
    exact = multiples is None
    numbers = logprobs.astype(np.float32).view(np.uint32).astype(np.int64) if multiples is None else multiples
    most = 0 if exact else int(numbers.min(initial=0))
    numbers = numbers - most
    body = _Body(
        head=_Head(*(getattr(trajectory, name) for name in _Head.__struct_fields__)),
        lengths=_packed(np.array([segment.tokens.size for segment in trajectory.segments], np.int64)),
        sets=[_packed(np.diff(ids.astype(np.int64), prepend=0)) for ids in trajectory.allowed_sets],
        tokens=_packed(tokens),
        run_lengths=_packed(np.diff(starts, append=len(tokens))),
        run_masks=_packed(mask[starts]),
        run_versions=_packed(versions[starts].astype(np.int64) + 1),
        run_allowed=_packed(allowed[starts].astype(np.int64) + 1),
        exact=exact,
        most=most,
        logprobs=_packed(numbers >> 8),
    )
    plain = _ENCODER.encode(body)
    noise = (numbers & 0xFF).astype(np.uint8).tobytes()
    return _ENCODER.encode(_Record(len(plain), zlib.compress(plain, wbits=-zlib.MAX_WBITS), noise))


def decode(record: bytes | memoryview) -> Trajectory:
    """What ``encode`` made; arrays of the types of ``actors.trajectory``. Raises ``NotCoded``."""
    try:
        outer = _RECORD.decode(record)
        body = _BODY.decode(_inflated(outer))
        return _trajectory(body, outer.noise)
    except (msgspec.MsgspecError, zlib.error, ValueError, OverflowError) as error:
        raise NotCoded(" ".join(str(error).split())) from None


def _inflated(record: _Record) -> bytes:
    if not 0 <= record.size <= MOST_BYTES:
        raise NotCoded(f"a body of {record.size} bytes")
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    plain = stream.decompress(record.body, record.size + 1)
    if len(plain) != record.size or not stream.eof or stream.unused_data:
        raise NotCoded(f"expected a body of {record.size} bytes, found another")
    return plain


def _trajectory(body: _Body, noise: bytes) -> Trajectory:
    tokens, lengths = _unpacked(body.tokens), _unpacked(body.lengths)
    runs = _unpacked(body.run_lengths)
    if min(lengths.min(initial=0), runs.min(initial=0)) < 0 or not tokens.size == lengths.sum() == runs.sum():
        raise NotCoded(f"{tokens.size} tokens, segments of {lengths.sum()}, runs of {runs.sum()}")
    mask = np.repeat(_as(_unpacked(body.run_masks), np.uint8), runs)
    columns = {
        "tokens": _as(tokens, np.int32),
        "loss_mask": mask,
        "logprobs": _logprobs(body, np.frombuffer(noise, np.uint8), mask),
        "versions": np.repeat(_as(_unpacked(body.run_versions) - 1, np.int32), runs),
        "allowed": np.repeat(_as(_unpacked(body.run_allowed) - 1, np.int32), runs),
    }
    ends = np.cumsum(lengths)[:-1]
    parts = {name: np.split(column, ends) if lengths.size else [] for name, column in columns.items()}
    segments = [Segment(**{name: part[index].copy() for name, part in parts.items()}) for index in range(lengths.size)]
    sets = [_as(np.cumsum(_unpacked(each)), np.int32) for each in body.sets]
    return Trajectory(segments=segments, allowed_sets=sets, **msgspec.structs.asdict(body.head))


def _starts(*columns: NDArray[np.integer]) -> NDArray[np.int64]:
    """Where any of the columns changes: the first places of runs."""
    if not columns[0].size:
        return _EMPTY
    changes = np.zeros(columns[0].size, np.bool_)
    changes[0] = True
    for column in columns:
        changes[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(changes)


def _multiples(logprobs: NDArray[np.float32], mask: NDArray[np.uint8]) -> NDArray[np.int64] | None:
    """Of a step, of the sampled tokens; None where that would lose more than ``LOGPROB_ERROR``."""
    sampled = mask == 1
    others = np.ascontiguousarray(logprobs[~sampled], np.float32)
    own = logprobs[sampled].astype(np.float64)
    if np.any(others.view(np.uint32)) or not np.all(np.abs(own) < MOST_NATS):  # written so that NaN keeps all
        return None
    multiples: NDArray[np.int64] = np.rint(-own * STEPS_PER_NAT).astype(np.int64)
    return multiples


def _logprobs(body: _Body, noise: NDArray[np.uint8], mask: NDArray[np.uint8]) -> NDArray[np.float32]:
    numbers = (_unpacked(body.logprobs) << 8) + noise.astype(np.int64) + body.most
    if body.exact:
        if numbers.size != mask.size:
            raise NotCoded(f"{numbers.size} log-probabilities of {mask.size} tokens")
        return numbers.astype(np.uint32).view(np.float32)
    sampled = mask == 1
    if numbers.size != np.count_nonzero(sampled):
        raise NotCoded(f"{numbers.size} log-probabilities of {np.count_nonzero(sampled)} sampled tokens")
    logprobs = np.zeros(mask.size, np.float32)
    logprobs[sampled] = (0.0 - numbers / STEPS_PER_NAT).astype(np.float32)  # so that none becomes -0
    return logprobs


def _packed(numbers: NDArray[np.integer]) -> bytes:
    """How many planes there are, then the planes of the numbers' bytes, the lowest first."""
    wide = np.ascontiguousarray(numbers, dtype="<i8")
    planes = wide.view(np.uint8).reshape(-1, 8).T
    used = max(1, *(plane + 1 for plane in range(8) if planes[plane].any()), 1)
    return bytes([used]) + planes[:used].tobytes()


def _unpacked(data: bytes) -> NDArray[np.int64]:
    """Raises ``NotCoded``."""
    used = data[0] if data else 0
    if not 1 <= used <= 8 or (len(data) - 1) % used:
        raise NotCoded(f"{len(data)} bytes of {used} planes")
    planes = np.frombuffer(data, np.uint8, offset=1).reshape(used, -1)
    wide = np.zeros((planes.shape[1], 8), np.uint8)
    wide[:, :used] = planes.T
    numbers: NDArray[np.int64] = wide.view("<i8").reshape(-1)
    return numbers


def _as(numbers: NDArray[np.int64], dtype: type[np.integer]) -> NDArray[np.integer]:
    """Raises ``NotCoded`` where they do not fit."""
    narrow = numbers.astype(dtype)
    if np.any(narrow != numbers):
        raise NotCoded(f"numbers beyond {np.dtype(dtype)}: up to {numbers.max()}")
    return narrow
