"""Writes down one episode, token by token, as it happens.

Invariant: what has been recorded never changes. Tokens are appended to the current segment's buffers, a prompt handed
out is a read-only view of them that stays true while more is appended, and the ids that an engine sampled are the ids
that end up in the ``Trajectory``.

One recorder serves one trajectory; each turn costs time proportional to its new tokens::

    recorder = TrajectoryRecorder(ticket="t1", group=0, task=7, temperature=1.0)
    recorder.start(prompt_tokens, "SFFF ...")
    while True:
        completion = generate(recorder.prompt(), ...)
        recorder.sampled(completion.tokens, completion.logprobs, completion.versions, allowed_ids, "R")
        ...
        recorder.observed(observation_tokens, "b1")
    trajectory = recorder.finish(env_return=1.0, reward=1.0, success=True)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from actors.trajectory import FULL_VOCABULARY, PROMPT_VERSION, Segment, Trajectory

_FIRST_CAPACITY = 256


class RecorderError(ValueError):
    """A recording that would break an invariant of ``actors.trajectory``; the message names the trajectory."""


class _Buffers:
    """One segment under construction; everything but ``tokens`` is prefilled with what prompt tokens carry."""

    __slots__ = ("allowed", "capacity", "length", "logprobs", "loss_mask", "tokens", "versions")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.tokens = np.empty(capacity, np.int32)
        self.loss_mask = np.zeros(capacity, np.uint8)
        self.logprobs = np.zeros(capacity, np.float32)
        self.versions = np.full(capacity, PROMPT_VERSION, np.int32)
        self.allowed = np.full(capacity, FULL_VOCABULARY, np.int32)

    def room(self, extra: int) -> _Buffers:
        """Buffers with room for ``extra`` more tokens: these, or larger copies (earlier views keep the old ones)."""
        needed = self.length + extra
        if needed <= self.capacity:
            return self
        grown = _Buffers(max(needed, 2 * self.capacity))
        n = grown.length = self.length
        grown.tokens[:n] = self.tokens[:n]
        grown.loss_mask[:n] = self.loss_mask[:n]
        grown.logprobs[:n] = self.logprobs[:n]
        grown.versions[:n] = self.versions[:n]
        grown.allowed[:n] = self.allowed[:n]
        return grown

    def segment(self) -> Segment:
        """The recorded part, copied out of the larger buffers."""
        n = self.length
        return Segment(
            tokens=self.tokens[:n].copy(),
            loss_mask=self.loss_mask[:n].copy(),
            logprobs=self.logprobs[:n].copy(),
            versions=self.versions[:n].copy(),
            allowed=self.allowed[:n].copy(),
        )


class TrajectoryRecorder:
    """See the module docstring. Methods raise ``RecorderError``."""

    def __init__(self, ticket: str, group: int, task: int, temperature: float, capacity: int = _FIRST_CAPACITY) -> None:
        """``capacity``: tokens that a segment can hold before its buffers grow (they then double)."""
        self.ticket = ticket
        self.group = group
        self.task = task
        self.temperature = temperature
        self.turns = 0
        self.sampled_tokens = 0
        self.initiating_version: int | None = None  # None until the first token was sampled
        self.transcript: list[tuple[str, str]] = []
        self._capacity = capacity
        self._closed: list[Segment] = []
        self._current: _Buffers | None = None
        self._interned: dict[tuple[int, ...], int] = {}

    def start(self, prompt: NDArray[np.integer], text: str | None = None) -> None:
        """Open a segment whose first tokens are ``prompt`` (loss mask 0). A second call closes the segment before
        and opens the next one, as a context window does; ``text``, if given, is the observation for people."""
        if prompt.size == 0:
            raise RecorderError(f"trajectory {self.ticket}: a segment needs at least one prompt token")
        if self._current is not None:
            self._closed.append(self._current.segment())
        self._current = _Buffers(max(self._capacity, prompt.size))
        self._append(prompt)
        if text is not None:
            self.transcript.append(("observation", text))

    def prompt(self) -> NDArray[np.int32]:
        """The current segment's tokens so far: a read-only view, int32 [T], valid for ever."""
        buffers = self._open()
        view = buffers.tokens[: buffers.length]
        view.flags.writeable = False
        return view

    def __len__(self) -> int:
        """Number of tokens in the current segment; 0 before ``start``."""
        return 0 if self._current is None else self._current.length

    def sampled(
        self,
        tokens: NDArray[np.integer],
        logprobs: NDArray[np.floating],
        versions: NDArray[np.integer],
        allowed: tuple[int, ...] | None,
        text: str,
    ) -> None:
        """Append what an engine sampled in one turn; all arrays [N]. ``allowed``: the token ids that it was allowed
        to choose from, or None for the whole vocabulary; ``text``: the action."""
        count = len(tokens)
        if count == 0 or len(logprobs) != count or len(versions) != count:
            raise RecorderError(
                f"trajectory {self.ticket}, turn {self.turns}: expected tokens, log-probabilities and versions of one "
                f"length above 0, found {count}, {len(logprobs)} and {len(versions)}"
            )
        start, end = self._append(tokens)
        buffers = self._open()
        buffers.loss_mask[start:end] = 1
        buffers.logprobs[start:end] = logprobs
        buffers.versions[start:end] = versions
        if allowed is not None:
            buffers.allowed[start:end] = self._interned.setdefault(allowed, len(self._interned))
        if self.initiating_version is None:
            self.initiating_version = int(versions[0])
        self.turns += 1
        self.sampled_tokens += count
        self.transcript.append(("action", text))

    def observed(self, tokens: NDArray[np.integer], text: str) -> None:
        """Append what the environment answered (loss mask 0). The last observation of an episode, after which
        nothing is sampled, may come with no tokens: then it is only read by people."""
        self._append(tokens)
        self.transcript.append(("observation", text))

    def finish(self, *, env_return: float, reward: float, success: bool) -> Trajectory:
        """The finished trajectory, independent of this recorder. Raises ``RecorderError`` if nothing was sampled."""
        if self.initiating_version is None:
            raise RecorderError(f"trajectory {self.ticket}: it ended before anything was sampled; drop it instead")
        return Trajectory(
            ticket=self.ticket,
            group=self.group,
            task=self.task,
            initiating_version=self.initiating_version,
            temperature=self.temperature,
            segments=[*self._closed, self._open().segment()],
            allowed_sets=[np.unique(np.array(ids, np.int32)) for ids in self._interned],
            turns=self.turns,
            env_return=env_return,
            reward=reward,
            success=success,
            transcript=list(self.transcript),
        )

    def _open(self) -> _Buffers:
        if self._current is None:
            raise RecorderError(f"trajectory {self.ticket}: start() comes first, no segment is open")
        return self._current

    def _append(self, tokens: NDArray[np.integer]) -> tuple[int, int]:
        count = len(tokens)
        buffers = self._current = self._open().room(count)
        start, end = buffers.length, buffers.length + count
        buffers.tokens[start:end] = tokens
        buffers.length = end
        return start, end


def check_trajectory(trajectory: Trajectory) -> None:
    """Raise ``RecorderError`` unless every invariant of ``actors.trajectory`` holds."""
    where = f"trajectory {trajectory.ticket}"
    if not trajectory.segments or trajectory.sampled_tokens == 0:
        raise RecorderError(f"{where}: expected at least one segment with a sampled token, found none")
    for index, ids in enumerate(trajectory.allowed_sets):
        if ids.dtype != np.int32 or ids.ndim != 1 or ids.size == 0 or np.any(np.diff(ids) <= 0):
            raise RecorderError(f"{where}: allowed set {index} is not an ascending int32 array: {ids!r}")
    for index, segment in enumerate(trajectory.segments):
        _check_segment(segment, trajectory.allowed_sets, f"{where}, segment {index}")
    versions = np.concatenate([s.versions[s.loss_mask == 1] for s in trajectory.segments])
    if np.any(np.diff(versions) < 0):
        raise RecorderError(f"{where}: versions of sampled tokens go backwards: {versions.tolist()}")
    if versions[0] != trajectory.initiating_version:
        raise RecorderError(
            f"{where}: initiating version {trajectory.initiating_version}, "
            f"but the first token was sampled by {versions[0]}"
        )


def _check_segment(segment: Segment, allowed_sets: list[NDArray[np.int32]], where: str) -> None:
    expected = {"tokens": "int32", "loss_mask": "uint8", "logprobs": "float32", "versions": "int32", "allowed": "int32"}
    shape = segment.tokens.shape
    for name, dtype in expected.items():
        array = getattr(segment, name)
        if array.dtype != np.dtype(dtype) or array.ndim != 1 or array.shape != shape:
            raise RecorderError(f"{where}: {name} should be {dtype} {list(shape)}, found {array.dtype} {array.shape}")
    mask = segment.loss_mask == 1
    if np.any(segment.loss_mask > 1) or (mask.size and mask[0]):
        raise RecorderError(f"{where}: loss_mask should be 0 or 1, and 0 at the first position")
    if not np.all(np.isfinite(segment.logprobs)) or np.any(segment.logprobs > 1e-4):
        raise RecorderError(f"{where}: log-probabilities should be finite and at most 0")
    if np.any(segment.logprobs[~mask] != 0) or np.any(segment.versions[~mask] != PROMPT_VERSION):
        raise RecorderError(f"{where}: tokens that were not sampled should have log-probability 0 and no version")
    if np.any(segment.versions[mask] < 0):
        raise RecorderError(f"{where}: sampled tokens should carry the version that sampled them")
    if np.any(segment.allowed[~mask] != FULL_VOCABULARY):
        raise RecorderError(f"{where}: tokens that were not sampled should have no allowed set")
    for position in np.flatnonzero(segment.allowed != FULL_VOCABULARY):
        index = int(segment.allowed[position])
        if not 0 <= index < len(allowed_sets):
            raise RecorderError(f"{where}: position {position} points to allowed set {index} of {len(allowed_sets)}")
        if segment.tokens[position] not in allowed_sets[index]:
            raise RecorderError(
                f"{where}: token {segment.tokens[position]} at position {position} is not among those allowed there "
                f"({allowed_sets[index].tolist()})"
            )
