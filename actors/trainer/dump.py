"""Trajectories on disk, to train on, imitate or replay later: a directory of record files and a manifest.

    DUMP/dump.json           whose trajectories they are (tokenizer, vocabulary) and, once it is whole, what is in it
    DUMP/trajectories.log    the records (the format of ``actors.trainer.store``); or one file a step: v00001.log ...

Invariant: what is read back is, bit for bit, what was written. Every record has a checksum, and a dump that was
finished carries the digest of all its files, which is compared on reading; the order is that of the file names, then of
the records in them.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from actors.formats import DUMP, FormatRefused
from actors.policy import Policy
from actors.trainer.store import StoreCorrupt, read_records, write_records
from actors.trajectory import FULL_VOCABULARY, Trajectory

MANIFEST_FILE = "dump.json"
RECORDS_FILE = "trajectories.log"
RECORDED = "recorded"
"""Directory of a run that keeps what it trains on (``train.record``): one file a step."""
FORMAT = DUMP.current


class DumpError(ValueError):
    """A dump that cannot be read, or does not fit what it is to be used for; one line for the user."""


class DumpFacts(msgspec.Struct, frozen=True):
    """Whose tokens these are: what a policy must share to be trained on them."""

    tokenizer: str  # "bytes", or the digest of a tokenizer.json
    vocab_size: int  # of the model


class DumpContent(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished dump holds."""

    trajectories: int
    groups: int
    group_size: int  # of the largest group
    turns: int
    sampled_tokens: int
    success: float  # 0 to 1
    return_mean: float
    reward_mean: float
    versions: tuple[int, int]  # the oldest and the newest that sampled
    lost: dict[str, int]  # wanted, but not here, by reason
    digest: str  # blake2b of all record files


class _Format(msgspec.Struct, frozen=True):
    """What can be read of every format, past and future."""

    format: int | None = None


class Manifest(msgspec.Struct, frozen=True):
    """Content of ``dump.json``. ``content`` is missing while somebody still adds to the dump."""

    format: int
    name: str  # of the job
    environment: str
    facts: DumpFacts
    content: DumpContent | None = None


class Dump(msgspec.Struct, frozen=True):
    """A dump that was read."""

    path: Path
    manifest: Manifest
    trajectories: list[Trajectory]

    @property
    def groups(self) -> list[list[Trajectory]]:
        """Trajectories of one task, in the order in which the groups begin."""
        groups: dict[int, list[Trajectory]] = {}
        for trajectory in self.trajectories:
            groups.setdefault(trajectory.group, []).append(trajectory)
        return list(groups.values())


def facts_of(policy: Policy, vocab_size: int) -> DumpFacts:
    """Those of a policy's tokens. Raises ``DumpError`` where the tokenizer's file cannot be read."""
    source = policy.tokenizer or policy.path or "bytes"
    if source == "bytes":
        return DumpFacts("bytes", vocab_size)
    path = Path(source) / "tokenizer.json"
    try:
        return DumpFacts(_digest([path]), vocab_size)
    except OSError as error:
        raise DumpError(f"{path}: cannot be read: {error.strerror}") from None


def begin_dump(directory: Path, manifest: Manifest) -> None:
    """Make the directory and say whose trajectories it will hold."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_manifest(directory, manifest)


def add_step(directory: Path, version: int, trajectories: Iterable[Trajectory]) -> None:
    """Keep what the step to ``version`` was made of; a step that is done again (after going back to a checkpoint)
    replaces what is there."""
    partial = directory / f".v{version:05d}.partial"
    write_records(partial, trajectories)
    partial.replace(directory / _step_file(version))


def write_dump(
    directory: Path, manifest: Manifest, trajectories: Sequence[Trajectory], lost: dict[str, int]
) -> Manifest:
    """Write a whole dump into a new or empty directory; returns its manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    write_records(directory / RECORDS_FILE, trajectories)
    finished = msgspec.structs.replace(manifest, content=_content(trajectories, lost, _digest(_files(directory))))
    _write_manifest(directory, finished)
    return finished


def read_dump(path: Path, step: int | None = None) -> Dump:
    """A dump, or what a run directory has recorded; of a directory with a file for each step, with ``step``, only what
    the step to that version was made of. Raises ``DumpError``."""
    directory = path / RECORDED if (path / RECORDED).is_dir() else path
    manifest = _read_manifest(directory, asked=path)
    files = _files(directory)
    if step is not None and manifest.content is None:
        files = [file for file in files if file.name == _step_file(step)]
        if not files:
            raise DumpError(f"{directory}: there is no step {step} in it; there are {_steps(directory)}")
    try:
        trajectories = [trajectory for file in files for trajectory, _ in read_records(file)]
        digest = _digest(files)
    except (StoreCorrupt, OSError) as error:
        raise DumpError(f"{directory}: {error}") from None
    if not trajectories:
        raise DumpError(f"{directory}: there is no trajectory in it")
    if manifest.content is not None and manifest.content.digest != digest:
        raise DumpError(f"{directory}: its files are not those that were written (the digest differs)")
    return Dump(directory, manifest, trajectories)


def check_fit(dump: Dump, facts: DumpFacts) -> None:
    """Refuse a dump whose tokens another policy would read as something else. Raises ``DumpError``."""
    theirs = dump.manifest.facts
    if theirs.tokenizer != facts.tokenizer:
        raise DumpError(
            f"{dump.path}: its tokens are those of another tokenizer ({theirs.tokenizer}) than the policy's "
            f"({facts.tokenizer}); use the tokenizer that it was made with (policy.tokenizer), or make a new dump"
        )
    for trajectory in dump.trajectories:
        largest = max(int(segment.tokens.max(initial=0)) for segment in trajectory.segments)
        allowed = max((int(ids[-1]) for ids in trajectory.allowed_sets if ids.size), default=0)
        if max(largest, allowed) >= facts.vocab_size:
            what = "token" if largest >= facts.vocab_size else "allowed token"
            raise DumpError(
                f"{dump.path}: trajectory {trajectory.ticket} has {what} {max(largest, allowed)}, the policy's "
                f"vocabulary ends at {facts.vocab_size - 1} (the dump's at {theirs.vocab_size - 1})"
            )
        _check_allowed(dump.path, trajectory)


def _check_allowed(path: Path, trajectory: Trajectory) -> None:
    """Every sampled token is in the set that it was drawn from."""
    for segment in trajectory.segments:
        for index in np.unique(segment.allowed[segment.loss_mask == 1]):
            if index == FULL_VOCABULARY:
                continue
            drawn = segment.tokens[(segment.loss_mask == 1) & (segment.allowed == index)]
            known = 0 <= index < len(trajectory.allowed_sets)
            if not known or not np.isin(drawn, trajectory.allowed_sets[index]).all():
                raise DumpError(
                    f"{path}: trajectory {trajectory.ticket} has sampled tokens that are not in its allowed set {index}"
                )


def _content(trajectories: Sequence[Trajectory], lost: dict[str, int], digest: str) -> DumpContent:
    sizes = Counter(trajectory.group for trajectory in trajectories)
    versions = [
        segment.versions[segment.loss_mask == 1] for trajectory in trajectories for segment in trajectory.segments
    ]
    sampled = np.concatenate(versions) if versions else np.zeros(1, np.int32)
    return DumpContent(
        trajectories=len(trajectories),
        groups=len(sizes),
        group_size=max(sizes.values(), default=0),
        turns=sum(trajectory.turns for trajectory in trajectories),
        sampled_tokens=sum(trajectory.sampled_tokens for trajectory in trajectories),
        success=_mean([float(trajectory.success) for trajectory in trajectories]),
        return_mean=_mean([trajectory.env_return for trajectory in trajectories]),
        reward_mean=_mean([trajectory.reward for trajectory in trajectories]),
        versions=(int(sampled.min()), int(sampled.max())),
        lost=lost,
        digest=digest,
    )


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _step_file(version: int) -> str:
    return f"v{version:05d}.log"


def _steps(directory: Path) -> str:
    numbers = [int(path.stem[1:]) for path in _files(directory) if path.stem[1:].isdigit()]
    return f"{numbers[0]} to {numbers[-1]}" if numbers else "none"


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*.log") if not path.name.startswith("."))


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        digest.update(path.read_bytes())
    return f"blake2b:{digest.hexdigest()}"


def _write_manifest(directory: Path, manifest: Manifest) -> None:
    partial = directory / f".{MANIFEST_FILE}.partial"
    with partial.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(directory / MANIFEST_FILE)


def _read_manifest(directory: Path, *, asked: Path) -> Manifest:
    path = directory / MANIFEST_FILE
    if (asked / "owner.lock").is_file() and not path.is_file():
        raise DumpError(
            f"{asked}: this run has kept no trajectories; train with train.record=true, or make a dump of its policy "
            f"with bin/rollout"
        )
    try:
        content = path.read_bytes()
        DUMP.check(msgspec.json.decode(content, type=_Format).format, path)
        return msgspec.json.decode(content, type=Manifest)
    except FormatRefused as error:
        raise DumpError(str(error)) from None
    except OSError as error:
        raise DumpError(f"{path}: {error.strerror}; expected a dump (bin/rollout makes one) or a run") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DumpError(f"{path}: not the manifest of a dump: {error}") from None
