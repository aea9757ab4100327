"""How each role of a run is started on a node: the actors, the child processes, and whom they look for.

The same functions serve one command that holds all roles and a process for each: a role finds its peers through the
coordinator, so the order of starting does not matter.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from actors.core import Node, Ref
from actors.core.hosting import ChildSpec
from actors.core.leader import Leader
from actors.core.pool import WorkerPool
from actors.core.restarts import Restarts
from actors.env.agents.conversation import Renderer
from actors.env.agents.play import Endpoint, Sessions
from actors.env.agents.session import Rules
from actors.env.framing import framing_for
from actors.env.manager import EnvHost
from actors.env.peers import Peers
from actors.env.proxies import Proxies
from actors.env.tokenizers import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer
from actors.proxy.engines.progress import Patience
from actors.proxy.engines.protocol import EngineLimits, KvRole
from actors.proxy.fleet import EngineFleet
from actors.proxy.proxy import LLMProxy
from actors.reward.reward import RewardActor
from actors.telemetry import Spans, report_spans
from actors.trainer.batches import BatchFiles
from actors.trainer.store import TrajectoryStore
from actors.trainer.trainer import BUFFER_FILE, Trainer
from actors.weightsync.sync import WeightSync
from coordinator.allegiance import Allegiance
from coordinator.dumping import manifest_of
from coordinator.job import Job, declared_classes
from coordinator.messages import Announce, Announced, Find, Found, Role, RoleFailed
from coordinator.proxies import ProxyNews
from coordinator.resources.mapper import known_costs
from coordinator.resources.resolve import Place, Placement, number, policy_facts
from coordinator.serving import Serving
from hwprobe.offers import gpu_share

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 10.0
SERVING_RETRIES = 5
GUESTS = "sessions"
"""Directory of a run: how guests come in, and what they were answered (``actors.env.agents.guests``)."""
GPU_SHARE = "ROLLART_GPU_SHARE"
"""As in ``actors.gpu_memory``, which needs torch."""
PARENT_SILENCES = 3.0
"""A child gives up a parent that is silent this many times as long as it takes to give up a child."""


class RoleContext:
    """What a role gets to see of the run it takes part in."""

    def __init__(
        self,
        node: Node,
        leader: Leader,
        job: Job,
        placement: Placement,
        *,
        run: str,
        job_directory: Path,
        policy_directory: Path,
        run_directory: Path,
        resume: Path | None,
        version: int,
        host: str,
        key_file: Path | None,
        proxies: ProxyNews | None = None,
        allegiance: Allegiance | None = None,
        keeps_store: bool = False,
    ) -> None:
        """``proxies``: what is heard of them here. ``allegiance``: of a node of its own, whose leader may change.
        ``keeps_store``: see ``Welcome``."""
        self.proxies = proxies or ProxyNews()
        self.keeps_store = keeps_store
        self.node = node
        self.leader = leader
        self.telemetry = leader.ref if allegiance is None else allegiance.ref
        self.job = job
        self.placement = placement
        self.run = run
        self.job_directory = job_directory
        self.policy_directory = policy_directory
        self.run_directory = run_directory
        self.resume = resume
        self.version = version
        self._host = host
        self._key_file = key_file
        self._allegiance = allegiance

    async def find(self, role: Role) -> Ref:
        """The actor that has a role, once it is announced. Raises ``TimeoutError`` or ``RemoteError`` naming it."""
        return (await self._find(role)).ref

    async def _find(self, role: Role) -> Found:
        timeout_s = self.job.coordinator.start_timeout_s
        limit_s = timeout_s + ASK_TIMEOUT_S
        return await self.leader.ask(self.node, Find(role, timeout_s), Found, timeout_s=limit_s)

    async def find_proxies(self) -> ProxyNews:
        """Once there is one: what is heard of them from now on. Raises what ``find`` raises."""
        found = await self._find("proxy")
        if found.proxies is not None:
            self.proxies.hear(found.proxies)
        elif not self.proxies.found.members:
            self.proxies.hear_of_one(found.ref)
        return self.proxies

    async def office(self, role: Role) -> Leader:
        """The same, whoever has the role later on. An ask of one that is gone waits as long as a role may take to
        become ready."""
        ref = await self.find(role)
        if self._allegiance is None:
            return Leader(ref)
        found = Leader(ref, patience_s=self.job.coordinator.start_timeout_s, late_is_gone=False)
        self._allegiance.on_moved(role, found.follow)
        return found

    def on_moved(self, role: Role, follow: Callable[[Ref], object]) -> None:
        """``follow`` is told whenever another actor has the role; where all roles share a node nobody else ever has."""
        if self._allegiance is not None:
            self._allegiance.on_moved(role, follow)

    async def announce(
        self, role: Role, ref: Ref, *, places: int = 0, serving: dict[str, int] | None = None, retries: int = 0
    ) -> None:
        message = Announce(role, ref, places, serving or {})
        if self._allegiance is not None:
            self._allegiance.announces(message)
        await self.leader.ask(self.node, message, Announced, timeout_s=ASK_TIMEOUT_S, retries=retries)

    def failed(self, role: Role) -> Callable[[BaseException], None]:
        """What a role calls when it cannot go on."""
        name = self.node.address.name

        def tell(error: BaseException) -> None:
            failure = RoleFailed(role, name, str(error))
            if self._allegiance is not None:
                self._allegiance.fails(failure)
            else:
                self.leader.tell(self.node, failure)

        return tell

    def child(self, name: str, settings: Mapping[str, Any]) -> ChildSpec:
        """The command line of a child process of this node."""
        return ChildSpec(
            name=f"{self.node.address.name}.{name}" if self.node.address.name != "control" else name,
            job=self.run,
            parent=self.node.address,
            log_directory=str(self.run_directory / "logs"),
            settings=dict(settings),
            telemetry=self.telemetry,
            host=self._host,
            key_file=None if self._key_file is None else str(self._key_file),
            parent_silence_s=PARENT_SILENCES * self.job.coordinator.silence_s,
        )

    def environment(self, place: Place) -> dict[str, str]:
        """Environment variables of a child process: threads, the one GPU that it may see, and its share of that."""
        settings = {"OMP_NUM_THREADS": str(place.threads), "MKL_NUM_THREADS": str(place.threads)}
        if place.cuda:
            settings["CUDA_VISIBLE_DEVICES"] = place.cuda
            beside = sum(other.device == place.device for other in self.placement.places)
            settings[GPU_SHARE] = f"{gpu_share(beside):.4f}"
        return settings


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value)


def _prompts(context: RoleContext, hardware_class: str) -> tuple[str, KvRole] | None:
    """Where an engine shares prompts with the others of its run, and which part it has."""
    split = context.job.rollout.split
    if split is None:
        return None
    return str(context.run_directory / "prompts"), "prefill" if hardware_class in split.prefill else "decode"


async def start_proxy(context: RoleContext) -> None:
    """The LLM proxy and its engine processes."""
    job, places = context.job, context.placement.of("engine")
    limits = EngineLimits(number(job.rollout.max_sequences), number(job.rollout.max_model_len))
    specs = {}
    for index, place in enumerate(places):
        settings = {
            "kind": job.rollout.engine,
            "policy_directory": str(context.policy_directory),
            "dtype": job.policy.dtype,
            "policy": _plain(job.policy),
            "limits": _plain(limits),
            "seed": job.seed + index,
            "tensor_parallel": job.rollout.tensor_parallel,
            "cuda_graphs": job.rollout.cuda_graphs,
            "load_every_s": job.rollout.load_every_s,
            "tokens_every_s": job.rollout.tokens_every_s,
            "kv_store": _prompts(context, place.hardware_class),
            "url": job.rollout.servers[index] if job.rollout.servers else None,
            "key_variable": job.rollout.server_key,
        }
        spec = context.child(place.name, settings)
        specs[spec.name] = (spec, context.environment(place), place.hardware_class)
    classes = {name: class_ for name, (_, _, class_) in specs.items()}
    costs = known_costs(context.run_directory, context.policy_directory, job.policy.dtype, classes.values())

    async def announce(ref: Ref, places: dict[str, int]) -> None:
        await context.announce("proxy", ref, serving=places, retries=SERVING_RETRIES)

    serving = Serving(context.node, announce)
    proxy = LLMProxy(
        classes,
        declared_classes(job),
        failed=context.failed("proxy"),
        serves=serving.changed,
        costs=costs,
        split=job.rollout.split,
    )
    commands = {name: (spec, environment) for name, (spec, environment, _) in specs.items()}
    restarts = Restarts(at_most=job.rollout.engine_restarts, within_s=job.rollout.engine_restarts_within_s)
    proxy.fleet = EngineFleet(
        context.node,
        commands,
        proxy,
        silence_s=job.coordinator.silence_s,
        restarts=restarts,
        patience=Patience(job.rollout.progress_timeout_s),
    )
    ref = await context.node.spawn(lambda: proxy, "proxy", restarts=0)
    await proxy.fleet.start()
    await context.announce("proxy", ref)
    serving.begin(ref)
    proxy.introduce(await context.find("weightsync"))
    context.on_moved("weightsync", proxy.introduce)


async def start_weightsync(context: RoleContext) -> None:
    spans = Spans("weightsync")
    weightsync = WeightSync(spans)
    (await context.find_proxies()).on_change(weightsync.follow)
    ref = await context.node.spawn(lambda: weightsync, "weightsync", restarts=0)
    context.node.background(report_spans(context.node, context.telemetry, spans))
    await context.announce("weightsync", ref)


async def start_reward(context: RoleContext) -> None:
    job = context.job
    if job.reward.function == "environment":
        ref = await context.node.spawn(lambda: RewardActor(job.reward.timeout_s, None), "reward")
    else:
        pool = await _worker_pool(context, "reward-worker", "reward-pool", "reward")
        ref = await context.node.spawn(lambda: RewardActor(job.reward.timeout_s, pool), "reward")
    await context.announce("reward", ref)


async def start_env(context: RoleContext) -> None:
    """An env host and its pool of workers."""
    job = context.job
    tokenizer = load_tokenizer(job.policy)
    pool = await _worker_pool(context, "env-worker", "env-pool", "env")
    proxies = Proxies(
        affinity=declared_classes(job),
        patience_s=job.coordinator.start_timeout_s,
        late_s=job.coordinator.silence_s,
    )
    (await context.find_proxies()).on_change(proxies.follow)
    peers = Peers(
        coordinator=context.leader,
        proxies=proxies,
        reward=await context.office("reward"),
        store=await context.office("trainer"),
    )
    sessions, endpoint = _agents(job, tokenizer, context.run_directory)
    host = EnvHost(
        job.environment,
        job.rollout,
        concurrent=number(job.environment.concurrent),
        reward_timeout_s=job.reward.timeout_s,
        framing=framing_for(tokenizer),
        pool=pool,
        peers=peers,
        sessions=sessions,
        endpoint=endpoint,
    )
    ref = await context.node.spawn(lambda: host, "env", restarts=0)
    await context.announce("env", ref, places=number(job.environment.concurrent))


def _agents(
    job: Job, tokenizer: ByteTokenizer | HuggingFaceTokenizer, run_directory: Path
) -> tuple[Sessions, Endpoint] | tuple[None, None]:
    """What agents ask, where the job's environment is one."""
    settings = job.environment.agent
    if settings is None:
        return None, None
    from actors.env.agents.server import HttpEndpoint  # noqa: PLC0415 (a library that no other job needs)

    rules = Rules(
        model=job.name,
        temperature=job.rollout.temperature,
        max_turns=job.environment.max_turns,
        max_tokens=job.rollout.max_tokens_per_turn,
        max_model_len=number(job.rollout.max_model_len),
        vocabulary=policy_facts(job).vocab_size,
    )
    renderer = Renderer(tokenizer, settings.tool_calls)
    return Sessions(settings, rules, renderer, run_directory / GUESTS), HttpEndpoint()


async def _worker_pool(context: RoleContext, kind: str, actor: str, role: Role) -> WorkerPool:
    settings = {
        "environment": _plain(context.job.environment),
        "reward": _plain(context.job.reward),
        "job_directory": str(context.job_directory),
        "pool": actor,
    }
    places = context.placement.of(kind)
    specs = {spec.name: spec for spec in (context.child(place.name, settings) for place in places)}
    environment = context.environment(places[0])
    silence_s = context.job.coordinator.silence_s
    pool = WorkerPool("actors.env.worker", specs, environment, context.failed(role), silence_s=silence_s)
    await context.node.spawn(lambda: pool, actor, restarts=0)
    return pool


async def start_trainer(context: RoleContext) -> None:
    """The trainer actor, its trajectory store and its rank processes."""
    job, places = context.job, context.placement.of("trainer")
    buffered = None if context.resume is None or context.keeps_store else context.resume / BUFFER_FILE
    store = TrajectoryStore(context.run_directory / "store" / BUFFER_FILE, start_from=buffered)
    rendezvous = context.run_directory / "store" / f"rendezvous-{uuid.uuid4().hex}"
    specs = []
    for rank, place in enumerate(places):
        settings = {
            "train": _plain(job.train),
            "policy_directory": str(context.policy_directory),
            "from_scratch": job.policy.path is None,
            "dtype": job.policy.dtype,
            "vocab_size": policy_facts(job).vocab_size,
            "seed": job.seed,
            "rank": rank,
            "world_size": len(places),
            "rendezvous": str(rendezvous),
            "resume_from": None if context.resume is None else str(context.resume),
            "version": context.version,
        }
        specs.append(context.child(place.name, settings))
    trainer = Trainer(
        job.train,
        store,
        specs,
        [context.environment(place) for place in places],
        context.failed("trainer"),
        batches=BatchFiles(context.run_directory, manifest_of(job), record=job.train.record),
        silence_s=job.coordinator.silence_s,
    )
    ref = await context.node.spawn(lambda: trainer, "trainer", restarts=0)
    await context.announce("trainer", ref)


START: dict[Role, Callable[[RoleContext], Coroutine[Any, Any, None]]] = {
    "proxy": start_proxy,
    "weightsync": start_weightsync,
    "reward": start_reward,
    "env": start_env,
    "trainer": start_trainer,
}
