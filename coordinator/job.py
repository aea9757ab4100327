"""A job: everything that a run is told, as typed structs read from YAML.

Invariant: an unknown key, a wrong type or an impossible value is refused with one line that names its path, before
anything is started.
"""

from __future__ import annotations

import math
import re
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from actors.policy import Policy, Qwen3Shape
from actors.proxy.messages import ADVICE
from actors.settings import (
    AgentSettings,
    EnvironmentSettings,
    RewardSettings,
    RolloutSettings,
    Settings,
    SftSettings,
    TrainSettings,
)
from actors.trainer.algorithms.algorithm import AlgorithmError
from actors.trainer.algorithms.presets import all_of
from coordinator.metadata.credentials import CredentialsError, read_credentials
from coordinator.metadata.spec import parse_spec
from coordinator.observe.tracking.settings import TrackerSettings, TrackersUnusable, check_settings
from coordinator.resources.settings import BindingSettings
from coordinator.scheduling.mix import Mix, TaskStream
from hwprobe.profile import ResourceProfile


class SchedulingSettings(Settings, frozen=True):
    """Which trajectories run, and which may be trained on."""

    alpha: int = 1  # a step may train on versions up to this much older than the learner's
    watch_alpha: bool = True  # whether evaluations that fluctuate lower alpha (``coordinator.steadiness``)
    unsteady_above: float = 0.15  # standard deviation over mean of the last 20 evaluations: from here on alpha falls
    steady_below: float = 0.05  # ... until they fluctuate less than this
    steady_about: Literal["mean", "trend"] = "mean"  # trend: of what a straight line through them leaves
    alpha_wait: int = 5  # evaluations from one lowering to the next: what the last one did must show first
    redundant_groups: int = 0  # groups launched beyond the need; cut once the target is in
    order: Literal["pipelined", "paper"] = "pipelined"
    batch_timeout_s: float = 600.0  # how long a step waits for its batch before the run stops with an error
    losses_in_a_row: int = 500  # so many lost trajectories with none stored between them stop the run with an error
    mix: dict[str, TaskStream] = msgspec.field(default_factory=dict)  # streams of tasks; none: all tasks in order
    queue_ttl_s: float = 3600.0  # a trajectory that has waited this long for a place is evicted with its group


class EvaluationSettings(Settings, frozen=True):
    """Held-out evaluation, greedy."""

    every: int = 5  # steps between evaluations; 0 is never
    episodes: int = 8
    target: float | None = None  # stop once this success rate is reached


class CheckpointSettings(Settings, frozen=True):
    every: int = 20  # steps between checkpoints; one is always written at the end
    keep: int = 2  # the newest ones; the best by evaluation is kept beside them


Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class CoordinatorSettings(Settings, frozen=True):
    store: str = "embedded"  # or zk://host:port,host:port; several ensembles separated by ";"
    store_credentials: str | None = None  # a file with user, password, tls (coordinator.metadata.credentials)
    store_timeout_s: float = 10.0
    start_timeout_s: float = 300.0  # how long roles may take to become ready
    silence_s: float = 20.0  # a process or node without a sign of life for this long is dead
    least_silence_s: float = 8.0  # a node that has always answered in time is dead after this long
    session_s: float = 3.0  # a leader that a ZooKeeper store does not hear for this long leads no longer
    takeover_s: float = 30.0  # how long roles on other nodes wait for another leader, once theirs is lost
    trusted_network: bool = False
    metrics_port: Port = 0  # of an HTTP endpoint for Prometheus, GET /metrics; 0 is none
    metrics_host: str = "127.0.0.1"  # where it listens; it is plain HTTP, for whoever can reach it


class Job(Settings, frozen=True):
    """The whole configuration; ``resolve`` (``coordinator.resources``) replaces every "auto"."""

    name: str = "job"
    seed: int = 0
    policy: Policy = Policy()
    environment: EnvironmentSettings = EnvironmentSettings()
    reward: RewardSettings = RewardSettings()
    rollout: RolloutSettings = RolloutSettings()
    train: TrainSettings = TrainSettings()
    sft: SftSettings = SftSettings()
    scheduling: SchedulingSettings = SchedulingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    binding: BindingSettings = BindingSettings()
    resource_profile: ResourceProfile = ResourceProfile()
    coordinator: CoordinatorSettings = CoordinatorSettings()
    trackers: TrackerSettings = TrackerSettings()


def declared_classes(job: Job) -> dict[str, str]:
    """Task -> the hardware class that the job declares for it. A stream of tasks has its own class, or its
    environment's, or the one of "default"."""
    declared, streams = job.rollout.affinity, job.scheduling.mix
    environment = declared.get(job.environment.name)
    return dict(declared) if environment is None else {**dict.fromkeys(streams, environment), **declared}


class JobError(ValueError):
    """A job that cannot be run as written; one line for the user."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes ``1e-5`` for text; here it is the number that everybody means by it."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load(path: Path, overrides: list[str] | None = None) -> Job:
    """Read a job file and apply overrides (``train.steps=10``). Raises ``JobError``."""
    try:
        text = path.read_text()
    except OSError as error:
        raise JobError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        tree = yaml.load(text, _Loader)
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
        value = yaml.load(text, _Loader)
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
    for key, number in _positive(job).items():
        if number != "auto" and not 0 < number < math.inf:
            raise JobError(f"{key}: expected a number above 0, found {number}")
    for key, number in _not_negative(job).items():
        if not 0 <= number < math.inf:
            raise JobError(f"{key}: expected 0 or more, found {number}")
    for key, number in {"adam_beta1": job.train.adam_beta1, "adam_beta2": job.train.adam_beta2}.items():
        if not 0 <= number < 1:
            raise JobError(f"train.{key}: expected a number from 0 to below 1, found {number}")
    if job.scheduling.steady_below > job.scheduling.unsteady_above:
        raise JobError(
            f"scheduling.steady_below: expected at most scheduling.unsteady_above ({job.scheduling.unsteady_above:g}), "
            f"found {job.scheduling.steady_below:g}"
        )
    _check_algorithms(job)
    _check_shares(job.sft)
    _check_mix(job)
    _check_mesh(job.train)
    if job.policy.path is None:
        _check_shape(job.policy.shape)
    elif not (Path(job.policy.path) / "config.json").is_file():
        raise JobError(f"policy.path: {job.policy.path} is not a model directory (no config.json there){_hint(job)}")
    _check_store(job.coordinator)
    if job.environment.agent is not None:
        _check_agent(job.environment.agent, trusted=job.coordinator.trusted_network)
    try:
        check_settings(job.trackers)
    except TrackersUnusable as error:
        raise JobError(str(error)) from None


def _check_algorithms(job: Job) -> None:
    """Before "auto" is resolved: a length that is needed will be known by then."""
    train = job.train
    unknown = sorted(set(train.algorithms) - set(job.scheduling.mix))
    if unknown:
        streams = ", ".join(sorted(job.scheduling.mix)) or "none"
        raise JobError(f"train.algorithms.{unknown[0]}: expected a stream of scheduling.mix ({streams})")
    try:
        algorithms = all_of(train)
    except AlgorithmError as error:
        raise JobError(f"train.{error}") from None
    if job.environment.agent is not None and any(each.estimator == "gigpo" for each in algorithms):
        raise JobError("train.algorithm: gigpo compares states of turns, which an agent's sessions do not have")
    for key, where in (("reference", train.reference), ("critic", train.critic)):
        if where not in (None, "initial") and not (Path(where) / "config.json").is_file():
            raise JobError(f"train.{key}: expected initial or a model directory, found {where} (no config.json there)")


MESH = ("tensor_parallel", "pipeline_parallel", "virtual_pipeline", "data_parallel", "distributed_optimizer")
"""Keys of ``train`` that say which rank holds what."""


def _check_mesh(train: TrainSettings) -> None:
    """What can never work, whatever the policy; ``coordinator.resources.resolve`` looks at that."""
    alone = TrainSettings()
    if train.backend == "torch":
        for key in (*MESH, "sequence_parallel"):
            if getattr(train, key) != getattr(alone, key):
                raise JobError(f"train.{key}: the torch backend runs in one process; use train.backend=megatron")
    if train.virtual_pipeline > 1 and train.pipeline_parallel == 1:
        raise JobError("train.virtual_pipeline: chunks are of stages; expected train.pipeline_parallel above 1")
    if train.sequence_parallel and train.tensor_parallel == 1:
        raise JobError("train.sequence_parallel: cuts over tensor ranks; expected train.tensor_parallel above 1")
    if train.distributed_optimizer and train.data_parallel == 1:
        raise JobError("train.distributed_optimizer: is shared by replicas; expected train.data_parallel above 1")


def _check_mix(job: Job) -> None:
    try:
        Mix(job.scheduling.mix)
    except ValueError as error:
        raise JobError(f"scheduling.mix: {error}") from None
    taken = sorted({"default", ADVICE} & set(job.scheduling.mix))
    if taken:
        raise JobError(f"scheduling.mix.{taken[0]}: this name means something else to rollout.affinity; choose another")


def _check_agent(agent: AgentSettings, *, trusted: bool) -> None:
    if not 0 < agent.timeout_s < math.inf:
        raise JobError(f"environment.agent.timeout_s: expected a number above 0, found {agent.timeout_s}")
    if agent.guests < 0:
        raise JobError(f"environment.agent.guests: expected 0 or more, found {agent.guests}")
    if not 0 < agent.guest_idle_s < math.inf:
        raise JobError(f"environment.agent.guest_idle_s: expected a number above 0, found {agent.guest_idle_s}")
    try:
        loopback = agent.host == "localhost" or ip_address(agent.host).is_loopback
    except ValueError:
        raise JobError(f"environment.agent.host: expected an IP address or localhost, found {agent.host!r}") from None
    if not loopback and not trusted:
        raise JobError(
            f"environment.agent.host: {agent.host} is beyond loopback, where keys and prompts travel unencrypted: set "
            "coordinator.trusted_network to true if nobody else is there, or put a TLS proxy before 127.0.0.1"
        )


def _hint(job: Job) -> str:
    smollm2 = job.policy.path is not None and Path(job.policy.path).name.startswith("smollm2")
    return ": bin/fetch-model smollm2 makes it, run from the same place" if smollm2 else ""


def _check_store(settings: CoordinatorSettings) -> None:
    try:
        parse_spec(settings.store)
        if settings.store_credentials is not None:
            read_credentials(Path(settings.store_credentials))
    except CredentialsError as error:
        raise JobError(f"coordinator.store_credentials: {error}") from None
    except ValueError as error:
        raise JobError(f"coordinator.store: {error}") from None


def _positive(job: Job) -> dict[str, float | Literal["auto"]]:
    """Settings that must be above 0."""
    return {
        "environment.max_turns": job.environment.max_turns,
        "environment.workers": job.environment.workers,
        "environment.concurrent": job.environment.concurrent,
        "environment.step_timeout_s": job.environment.step_timeout_s,
        "reward.timeout_s": job.reward.timeout_s,
        "reward.workers": job.reward.workers,
        "rollout.engines": job.rollout.engines,
        "rollout.threads": job.rollout.threads,
        "rollout.tensor_parallel": job.rollout.tensor_parallel,
        "rollout.temperature": job.rollout.temperature,
        "rollout.max_tokens_per_turn": job.rollout.max_tokens_per_turn,
        "rollout.max_sequences": job.rollout.max_sequences,
        "rollout.proxies": job.rollout.proxies,
        "rollout.turn_timeout_s": job.rollout.turn_timeout_s,
        "rollout.load_every_s": job.rollout.load_every_s,
        "rollout.tokens_every_s": job.rollout.tokens_every_s,
        "rollout.progress_timeout_s": job.rollout.progress_timeout_s,
        "rollout.engine_restarts_within_s": job.rollout.engine_restarts_within_s,
        "train.tensor_parallel": job.train.tensor_parallel,
        "train.pipeline_parallel": job.train.pipeline_parallel,
        "train.virtual_pipeline": job.train.virtual_pipeline,
        "train.data_parallel": job.train.data_parallel,
        "train.threads": job.train.threads,
        "train.steps": job.train.steps,
        "train.groups_per_step": job.train.groups_per_step,
        "train.learning_rate": job.train.learning_rate,
        "train.critic_rate": job.train.critic_rate,
        "train.adam_epsilon": job.train.adam_epsilon,
        "train.max_grad_norm": job.train.max_grad_norm,
        "train.final_grad_norm": job.train.final_grad_norm,
        "train.grad_norm_steps": job.train.grad_norm_steps,
        "train.group_size": job.train.group_size,
        "train.length": job.train.length,
        "train.micro_batch_tokens": job.train.micro_batch_tokens,
        "train.step_timeout_s": job.train.step_timeout_s,
        "sft.epochs": job.sft.epochs,
        "sft.batch_size": job.sft.batch_size,
        "sft.learning_rate": job.sft.learning_rate,
        "scheduling.batch_timeout_s": job.scheduling.batch_timeout_s,
        "scheduling.losses_in_a_row": job.scheduling.losses_in_a_row,
        "scheduling.unsteady_above": job.scheduling.unsteady_above,
        "scheduling.steady_below": job.scheduling.steady_below,
        "scheduling.alpha_wait": job.scheduling.alpha_wait,
        "scheduling.queue_ttl_s": job.scheduling.queue_ttl_s,
        "checkpoint.keep": job.checkpoint.keep,
        "coordinator.store_timeout_s": job.coordinator.store_timeout_s,
        "coordinator.start_timeout_s": job.coordinator.start_timeout_s,
        "coordinator.silence_s": job.coordinator.silence_s,
        "coordinator.least_silence_s": job.coordinator.least_silence_s,
        "coordinator.session_s": job.coordinator.session_s,
    }


def _not_negative(job: Job) -> dict[str, float]:
    """Settings that may be 0."""
    return {
        "train.recompute_versions": job.train.recompute_versions,
        "seed": job.seed,
        "rollout.engine_restarts": job.rollout.engine_restarts,
        "train.warmup_steps": job.train.warmup_steps,
        "train.weight_decay": job.train.weight_decay,
        "sft.warmup_steps": job.sft.warmup_steps,
        "sft.evaluate_every": job.sft.evaluate_every,
        "scheduling.alpha": job.scheduling.alpha,
        "scheduling.redundant_groups": job.scheduling.redundant_groups,
        "evaluation.every": job.evaluation.every,
        "evaluation.episodes": job.evaluation.episodes,
        "checkpoint.every": job.checkpoint.every,
        "coordinator.takeover_s": job.coordinator.takeover_s,
    }


def _check_shares(sft: SftSettings) -> None:
    if not 0 < sft.top_return <= 1:
        raise JobError(f"sft.top_return: expected a share above 0 and up to 1, found {sft.top_return}")
    if not 0 <= sft.held_out < 1:
        raise JobError(f"sft.held_out: expected a share from 0 to below 1, found {sft.held_out}")


def _check_shape(shape: Qwen3Shape) -> None:
    """A model of this shape can be built."""
    for name, number in msgspec.structs.asdict(shape).items():
        if not isinstance(number, bool) and number < 1:
            raise JobError(f"policy.shape.{name}: expected a number above 0, found {number}")
    if shape.heads % shape.kv_heads:
        raise JobError(
            f"policy.shape.kv_heads: {shape.kv_heads} does not divide policy.shape.heads ({shape.heads}): each is "
            f"shared by equally many"
        )
    if shape.head_dim % 2:
        raise JobError(f"policy.shape.head_dim: rotary positions need an even number, found {shape.head_dim}")
