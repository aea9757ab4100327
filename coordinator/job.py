"""A job: everything that a run is told, as typed structs read from YAML.

Invariant: an unknown key, a wrong type or an impossible value is refused with one line that names its path, before
anything is started.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from actors.policy import Policy
from actors.settings import EnvironmentSettings, RewardSettings, RolloutSettings, Settings, TrainSettings


class SchedulingSettings(Settings, frozen=True):
    """Which trajectories run, and which may be trained on."""

    alpha: int = 1  # a step may train on versions up to this much older than the learner's
    redundant_groups: int = 0  # groups launched beyond the need; cut once the target is in
    order: Literal["pipelined", "paper"] = "pipelined"
    batch_timeout_s: float = 600.0  # how long a step waits for its batch before the run stops with an error


class EvaluationSettings(Settings, frozen=True):
    """Held-out evaluation, greedy."""

    every: int = 5  # steps between evaluations; 0 is never
    episodes: int = 8
    target: float | None = None  # stop once this success rate is reached


class CheckpointSettings(Settings, frozen=True):
    every: int = 20  # steps between checkpoints; one is always written at the end
    keep: int = 2  # the newest ones; the best by evaluation is kept beside them


class CoordinatorSettings(Settings, frozen=True):
    store: str = "embedded"  # or zk://host:port,host:port; several ensembles separated by ";"
    store_timeout_s: float = 10.0
    start_timeout_s: float = 300.0  # how long roles may take to become ready
    trusted_network: bool = False


class Job(Settings, frozen=True):
    """The whole configuration; ``resolve`` (``coordinator.resources``) replaces every "auto"."""

    name: str = "job"
    seed: int = 0
    policy: Policy = Policy()
    environment: EnvironmentSettings = EnvironmentSettings()
    reward: RewardSettings = RewardSettings()
    rollout: RolloutSettings = RolloutSettings()
    train: TrainSettings = TrainSettings()
    scheduling: SchedulingSettings = SchedulingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    coordinator: CoordinatorSettings = CoordinatorSettings()


class JobError(ValueError):
    """A job that cannot be run as written; one line for the user."""


def load(path: Path, overrides: list[str] | None = None) -> Job:
    """Read a job file and apply overrides (``train.steps=10``). Raises ``JobError``."""
    try:
        text = path.read_text()
    except OSError as error:
        raise JobError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise JobError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise JobError(f"{path}: expected a mapping of settings, found {type(tree).__name__}")
    return convert(tree, str(path), overrides or [])


def convert(tree: dict[str, Any], where: str, overrides: list[str]) -> Job:
    """A job from plain data, overrides applied and checked. Raises ``JobError``."""
    for override in overrides:
        _apply(tree, override)
    try:
        job = msgspec.convert(tree, Job)
    except msgspec.ValidationError as error:
        raise JobError(f"{where}: {error}") from None
    check(job)
    return job


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise JobError(f"override {override!r}: expected key.path=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise JobError(f"override {override!r}: the value is not valid YAML") from None
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise JobError(f"override {override!r}: {parent} is {type(child).__name__}, not a section")
        node = child
    node[last] = value


def check(job: Job) -> None:
    """Refuse values that can never work. Raises ``JobError`` naming the key."""
    positive = {
        "environment.max_turns": job.environment.max_turns,
        "rollout.max_tokens_per_turn": job.rollout.max_tokens_per_turn,
        "train.steps": job.train.steps,
        "train.groups_per_step": job.train.groups_per_step,
        "train.tensor_parallel": job.train.tensor_parallel,
        "train.micro_batch_tokens": job.train.micro_batch_tokens,
        "checkpoint.keep": job.checkpoint.keep,
        "environment.step_timeout_s": job.environment.step_timeout_s,
        "rollout.turn_timeout_s": job.rollout.turn_timeout_s,
        "reward.timeout_s": job.reward.timeout_s,
        "scheduling.batch_timeout_s": job.scheduling.batch_timeout_s,
        "rollout.temperature": job.rollout.temperature,
        "train.learning_rate": job.train.learning_rate,
    }
    for key, number in positive.items():
        if not number > 0:
            raise JobError(f"{key}: expected a number above 0, found {number}")
    for key, number in {"scheduling.alpha": job.scheduling.alpha, "evaluation.every": job.evaluation.every}.items():
        if number < 0:
            raise JobError(f"{key}: expected 0 or more, found {number}")
    if job.train.group_size < 2:
        raise JobError(
            f"train.group_size: GRPO compares the members of a group; expected 2 or more, found {job.train.group_size}"
        )
    if job.train.backend == "torch" and job.train.tensor_parallel != 1:
        raise JobError("train.tensor_parallel: the torch backend runs in one process; use train.backend=megatron")
    heads = job.policy.shape.kv_heads
    if job.policy.path is None and heads % job.train.tensor_parallel:
        raise JobError(
            f"train.tensor_parallel: {job.train.tensor_parallel} does not divide policy.shape.kv_heads ({heads})"
        )
    if job.policy.path is not None and not (Path(job.policy.path) / "config.json").is_file():
        raise JobError(f"policy.path: {job.policy.path} is not a model directory (no config.json there)")
