"""A job sizes itself from the affinity map: every "auto" becomes a number, every part a place.

Invariant: a resolved job holds no "auto", and the placement names a device for every engine and trainer rank.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from actors.proxy.engines import EngineKind
from actors.proxy.routing import preferred_class
from actors.settings import TrainSettings
from coordinator.job import Job, JobError
from coordinator.messages import ROLES, Role
from coordinator.resources.binding import Binding, Need, bind, fallbacks
from hwprobe import AffinityMap, Device

N = TypeVar("N")

MAX_SEQUENCES = {"H800": 256, "H20": 128}
"""Batch ceilings by hardware class (the brief's); other classes take ``DEFAULT_SEQUENCES``."""

DEFAULT_SEQUENCES = 128
DEFAULT_MODEL_LEN = 4096
CORES_PER_WORKER = 8
"""Environment code gets one worker process for this many cores, at least one."""


class Place(msgspec.Struct, frozen=True):
    """One process and where it runs."""

    name: str
    role: Literal["engine", "trainer", "env-worker", "reward-worker"]
    device: str  # id in the affinity map
    hardware_class: str
    threads: int
    cuda: str = ""  # what CUDA_VISIBLE_DEVICES calls its devices, of which ``device`` is the first; empty for CPUs


class Placement(msgspec.Struct, frozen=True):
    """All child processes of a run."""

    places: list[Place]
    notes: list[str] = msgspec.field(default_factory=list)  # what is not as preferred, and why

    def of(self, role: str) -> list[Place]:
        return [place for place in self.places if place.role == role]

    def describe(self) -> str:
        """A table for people."""
        rows = [("process", "role", "device", "class", "threads")]
        rows += [(p.name, p.role, p.device, p.hardware_class, str(p.threads)) for p in self.places]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        table = "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )
        return "\n".join([table, *self.notes])


class PolicyFacts(msgspec.Struct, frozen=True):
    """What the control process needs to know of the model."""

    vocab_size: int
    max_positions: int
    kv_heads: int
    layers: int = 0  # 0: config.json does not say


def policy_facts(job: Job) -> PolicyFacts:
    """From the shape or the model directory's ``config.json``. Raises ``JobError``."""
    if job.policy.path is None:
        shape = job.policy.shape
        return PolicyFacts(shape.vocab_size, shape.max_positions, shape.kv_heads, shape.layers)
    path = Path(job.policy.path) / "config.json"
    try:
        config = json.loads(path.read_text())
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        layers = int(config.get("num_hidden_layers") or 0)
        return PolicyFacts(int(config["vocab_size"]), int(config["max_position_embeddings"]), int(heads), layers)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise JobError(f"policy.path: {path}: not a usable config.json: {error!r}") from None


def resolve(
    job: Job, affinity: AffinityMap, *, offline: bool = False, here: tuple[Role, ...] = ROLES
) -> tuple[Job, Placement]:
    """Replace every "auto" and place every process of this host; ``here``: the roles that it has, which share what
    there is; ``offline``: the trainer's alone. Raises ``JobError`` for what cannot fit."""
    here = ("trainer",) if offline else here
    plays = "proxy" in here and not job.rollout.servers  # servers have devices of their own
    ranks, training = job.train.ranks, job.train.ranks if "trainer" in here else 0
    cpu = next(device for device in affinity.devices if device.id == "cpu")
    gpus, team = list(affinity.gpus), job.rollout.tensor_parallel
    playing = team if plays else 0
    if gpus and len(gpus) < training + playing:
        needing = f"{training} ranks{' and an engine' if plays else ''}" if training else "an engine"
        raise JobError(f"train.{_largest(job.train)}: {needing} need {training + playing} GPUs, found {len(gpus)}")
    notes: list[str] = []
    for_training: list[Device] = [cpu] * ranks
    for_rollout: list[Team] = [(cpu,)]
    if gpus:
        trained_on, played_on, notes = _split(affinity, training, job, plays=plays)
        for_training, for_rollout = trained_on or for_training, played_on or for_rollout
    kind = _engine_kind(job)
    engines = _or(job.rollout.engines, len(job.rollout.servers) or len(for_rollout))
    processes = max(1, training + engines * playing)
    threads = max(1, affinity.cores // processes)
    workers = _or(job.environment.workers, max(1, affinity.cores // CORES_PER_WORKER))
    in_flight = _capacity(job) * job.train.group_size
    facts = policy_facts(job)
    notes += _check_mesh(job.train, facts)
    _check_team(team, kind, facts)
    _check_split(job, kind)
    longest = facts.max_positions - 1  # a full sequence can still be scored, which samples one token more
    if job.rollout.max_model_len != "auto" and not 2 <= job.rollout.max_model_len <= longest:
        raise JobError(
            f"rollout.max_model_len: expected 2 to {longest} (one less than the model's {facts.max_positions} "
            f"positions), found {job.rollout.max_model_len}"
        )
    ceiling = MAX_SEQUENCES.get(for_rollout[0][0].hardware_class, DEFAULT_SEQUENCES)
    replace = msgspec.structs.replace
    resolved = replace(
        job,
        environment=replace(job.environment, workers=workers, concurrent=_or(job.environment.concurrent, in_flight)),
        rollout=replace(
            job.rollout,
            engine=kind,
            engines=engines,
            threads=_or(job.rollout.threads, threads),
            max_sequences=_or(job.rollout.max_sequences, min(ceiling, max(1, -(-in_flight // engines)))),
            max_model_len=_or(job.rollout.max_model_len, min(longest, DEFAULT_MODEL_LEN)),
        ),
        train=replace(
            job.train,
            threads=_or(job.train.threads, threads),
            grad_norm_steps=_or(job.train.grad_norm_steps, job.train.steps),
            length=_or(job.train.length, job.environment.max_turns * job.rollout.max_tokens_per_turn),
        ),
    )
    return resolved, Placement(_of_this_host(_place(resolved, for_training, for_rollout, cpu), here), notes)


_PROCESSES: dict[Role, str] = {"trainer": "trainer", "proxy": "engine", "env": "env-worker", "reward": "reward-worker"}


def _of_this_host(places: list[Place], here: tuple[Role, ...]) -> list[Place]:
    kinds = {kind for role, kind in _PROCESSES.items() if role in here}
    return [place for place in places if place.role in kinds]


def _check_split(job: Job, kind: str) -> None:
    if job.rollout.split is not None and (kind != "vllm" or job.rollout.tensor_parallel > 1):
        raise JobError(
            f"rollout.split: engines of one device each (rollout.tensor_parallel=1) with rollout.engine=vllm hand "
            f"prompts on, found the {kind} engine with {job.rollout.tensor_parallel} devices"
        )


def _largest(train: TrainSettings) -> str:
    """The key that asks for the most ranks."""
    keys = ("tensor_parallel", "pipeline_parallel", "data_parallel")
    return max(keys, key=lambda key: int(getattr(train, key)))


def _check_mesh(train: TrainSettings, facts: PolicyFacts) -> list[str]:
    """Whether the trainer's ranks can share this policy, and how they do."""
    tensor, stages, chunks = train.tensor_parallel, train.pipeline_parallel, train.virtual_pipeline
    if facts.kv_heads % tensor:
        raise JobError(
            f"train.tensor_parallel: {tensor} does not divide the policy's key-value heads ({facts.kv_heads})"
        )
    if stages > 1 and facts.layers % (stages * chunks):
        key = "train.pipeline_parallel" if facts.layers % stages else "train.virtual_pipeline"
        raise JobError(f"{key}: {stages} stages of {chunks} chunks do not divide the policy's {facts.layers} layers")
    if train.ranks == 1:
        return []
    layers = f"{facts.layers // stages} layers" + (f" in {chunks} chunks" if chunks > 1 else "")
    with_what = {"sequence parallel": train.sequence_parallel, "distributed optimizer": train.distributed_optimizer}
    words = [f"{tensor} tensor x {train.data_parallel} data x {stages} pipeline (stages of {layers})"]
    words += [name for name, on in with_what.items() if on]
    return [f"{train.ranks} trainer ranks, neighbours first: {', '.join(words)}"]


def _check_team(team: int, kind: str, facts: PolicyFacts) -> None:
    if team > 1 and kind != "vllm":
        raise JobError(f"rollout.tensor_parallel: the {kind} engine runs on one device; use rollout.engine=vllm")
    if facts.kv_heads % team:
        raise JobError(
            f"rollout.tensor_parallel: {team} does not divide the policy's key-value heads ({facts.kv_heads})"
        )


def _or(value: N | Literal["auto"], otherwise: N) -> N:
    return otherwise if value == "auto" else value


def _capacity(job: Job) -> int:
    """Groups that may be in flight or buffered; see ``coordinator.scheduling.rolling.Rules``."""
    return (1 + job.scheduling.alpha) * job.train.groups_per_step + job.scheduling.redundant_groups


Team = tuple[Device, ...]
"""The devices of one engine."""


def _split(affinity: AffinityMap, ranks: int, job: Job, *, plays: bool) -> tuple[list[Device], list[Team], list[str]]:
    """Devices for training, then for engines out of the rest (as many as the job says, or all), and where one of them
    is not of the preferred class, why."""
    by_name = {f"{device.host}/{device.id}": device for device in affinity.devices}
    needs = [Need(role="train", count=ranks)]
    size = job.rollout.tensor_parallel
    if plays:
        left = len(affinity.gpus) - ranks
        declared = preferred_class(job.rollout.affinity, job.environment.name)
        wanted = left if job.rollout.engines == "auto" else min(job.rollout.engines * size, left)
        needs.append(Need(role="decode", count=wanted, declared=declared))
    bindings = bind(needs, affinity)
    devices = {
        role: [by_name[name] for binding in bindings if binding.role == role for name in binding.devices]
        for role in ("train", "decode")
    }
    told = [b for b in bindings if b.role == "train" or job.rollout.engines != "auto" or b is _first(bindings)]
    notes = fallbacks(told)
    teams = _teams(devices["decode"], affinity, size)
    if plays and not teams:
        raise JobError(f"rollout.tensor_parallel: no {size} of the GPUs that are left are of one class")
    idle = len(devices["decode"]) - size * len(teams)
    if idle:
        notes.append(f"{idle} GPUs stay idle: an engine takes {size} of one class")
    return devices["train"], teams, notes


def _teams(devices: list[Device], affinity: AffinityMap, size: int) -> list[Team]:
    """By ``size``, each of one class, and joined by NVLink where that can be had."""
    joined = {name: number for number, group in enumerate(affinity.peer_groups) for name in group}
    pools: dict[tuple[str, str], list[Device]] = {}
    for device in devices:
        pools.setdefault((device.host, device.hardware_class), []).append(device)
    teams: list[Team] = []
    for pool in pools.values():
        alone: list[Device] = []
        by_link: dict[int | None, list[Device]] = {}
        for device in pool:
            by_link.setdefault(joined.get(f"{device.host}/{device.id}"), []).append(device)
        for number, group in by_link.items():
            whole = 0 if number is None and size > 1 else len(group) // size * size
            teams += [tuple(group[at : at + size]) for at in range(0, whole, size)]
            alone += group[whole:]
        teams += [tuple(alone[at : at + size]) for at in range(0, len(alone) - size + 1, size)]
    return teams


def _first(bindings: list[Binding]) -> Binding | None:
    """Of the engines': where all devices are taken, only what the first ones miss is a fallback."""
    return next((binding for binding in bindings if binding.role == "decode"), None)


def check_trainable(job: Job) -> None:
    """Raises ``JobError`` for engines that cannot be given new weights."""
    if job.rollout.engine == "openai":
        raise JobError(
            "rollout.engine: openai servers keep the weights that they were started with, so nothing can be trained "
            "with them; use them with bin/rollout, or train with rollout.engine=torch, vllm or sglang"
        )


def _engine_kind(job: Job) -> EngineKind:
    served, servers = job.rollout.engine in ("openai", "sglang"), job.rollout.servers
    if served != bool(servers):
        wanted = "the URLs of its servers" if served else "none, which only openai and sglang engines have"
        raise JobError(f"rollout.servers: expected {wanted}, found {servers} with rollout.engine={job.rollout.engine}")
    if served and job.rollout.proxies > 1:
        raise JobError(f"rollout.proxies: servers belong to one proxy, found {job.rollout.proxies}")
    if served and job.rollout.engines not in ("auto", len(servers)):
        raise JobError(f"rollout.engines: expected one for each of {len(servers)} servers, found {job.rollout.engines}")
    installed = importlib.util.find_spec("vllm") is not None
    if job.rollout.engine == "auto":
        return "vllm" if installed else "torch"
    if job.rollout.engine == "vllm" and not installed:
        raise JobError(
            "rollout.engine: vllm is not installed here; use rollout.engine=torch, or bin/setup without --light"
        )
    return job.rollout.engine


def _place(job: Job, for_training: list[Device], for_rollout: list[Team], cpu: Device) -> list[Place]:
    places: list[Place] = []

    def add(
        name: str, role: Literal["engine", "trainer", "env-worker", "reward-worker"], threads: int, *on: Device
    ) -> None:
        cuda = ",".join(device.cuda_name for device in on)
        places.append(Place(name, role, on[0].id, on[0].hardware_class, threads, cuda))

    for index in range(number(job.rollout.engines)):
        add(f"engine-{index}", "engine", number(job.rollout.threads), *for_rollout[index % len(for_rollout)])
    for index in range(job.train.ranks):
        add(f"trainer-{index}", "trainer", number(job.train.threads), for_training[index])
    for index in range(number(job.environment.workers)):
        add(f"env-worker-{index}", "env-worker", 1, cpu)
    if job.reward.function != "environment":
        for index in range(job.reward.workers):
            add(f"reward-worker-{index}", "reward-worker", 1, cpu)
    return places


def number(value: int | Literal["auto"]) -> int:
    """A setting of a resolved job. Raises ``JobError`` for an unresolved one."""
    if value == "auto":
        raise JobError("the job is not resolved: a setting is still auto")
    return value
