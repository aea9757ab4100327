"""An env host among scripted peers: an environment worker and the services on nodes of their own, as in a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np

from actors.core import Actor, Node, Ref, handler
from actors.env.framing import TextFraming
from actors.env.manager import EnvHost
from actors.env.messages import (
    CloseEnv,
    DescribeEnv,
    EnvState,
    Followed,
    FollowTrajectory,
    LeftPlaces,
    Noted,
    Outcome,
    ResetDone,
    ResetEnv,
    Start,
    StepDone,
    StepEnv,
    Ticket,
)
from actors.env.peers import Peers
from actors.env.protocol import Observation, Step
from actors.env.proxies import Proxies
from actors.env.tokenizers import ByteTokenizer
from actors.proxy.engines.protocol import Completion, FinishReason, GenerateRequest
from actors.proxy.messages import Abort, Accepted, Add, Finished, RequestFailed, TrajectoryEnded
from actors.reward.messages import Score, Scored
from actors.settings import EnvironmentSettings, RolloutSettings
from actors.trainer.messages import Discard, Discarded, Store, Stored
from actors.trajectory import Trajectory
from bus.message import PeerLost
from bus.simulated import Link, SimulatedNetwork
from tests.support.loops import settle, until

RIGHT = ord("R")
ACTIONS = ("L", "R")


class Faults(msgspec.Struct):
    """What goes wrong, by ticket; a name stands for one fault."""

    of: dict[str, str] = {}

    def hits(self, ticket: str, fault: str) -> bool:
        return self.of.get(ticket) == fault


class ScriptedWorker(Actor):
    """An environment that ends after ``length`` steps with a return of 1. ``gate`` holds steps up."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.length = 3
        self.gate = asyncio.Event()
        self.gate.set()
        self.steps: dict[str, list[str]] = {}
        self.closed: list[str] = []
        self.waiting: list[str] = []

    async def _meet(self, ticket: str, during: str) -> None:
        if self.faults.hits(ticket, f"{during} raises"):
            raise RuntimeError(f"{during} failed")
        if self.faults.hits(ticket, f"{during} hangs"):
            self.waiting.append(ticket)
            await asyncio.Event().wait()

    @handler(concurrent=True)
    async def reset(self, message: ResetEnv) -> ResetDone:
        await self._meet(message.instance, "reset")
        self.steps[message.instance] = []
        text = "" if self.faults.hits(message.instance, "empty observation") else "0>"
        return ResetDone(Observation(text, ACTIONS), "")

    @handler(concurrent=True)
    async def step(self, message: StepEnv) -> StepDone:
        await self._meet(message.instance, "step")
        self.waiting.append(message.instance)
        await self.gate.wait()
        self.waiting.remove(message.instance)
        taken = self.steps[message.instance]
        taken.append(message.action)
        over = len(taken) == self.length
        step = Step(Observation(f"{len(taken)}>", ACTIONS), reward=float(over), terminated=over)
        return StepDone(step, success=over, env_return=float(over))

    @handler
    async def close(self, message: CloseEnv) -> None:
        self.closed.append(message.instance)


class ScriptedPool:
    """One worker."""

    def __init__(self, ref: Ref) -> None:
        self._ref = ref
        self.killed: list[str] = []
        self.not_ready = ""

    def pick(self) -> str:
        return "worker-0"

    async def worker(self, name: str) -> Ref:
        if self.not_ready:
            raise PeerLost(self.not_ready)
        return self._ref

    def kill(self, name: str) -> None:
        self.killed.append(name)


class ScriptedProxy(Actor):
    """Samples "R" under ``version``. Held requests are answered by ``answer``."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.version = 0
        self.holds: Callable[[GenerateRequest], bool] = lambda request: False
        self.accepts = asyncio.Event()
        self.accepts.set()
        self.held: dict[str, Ref] = {}
        self.requests: list[GenerateRequest] = []
        self.asked: list[tuple[str, int | None]] = []  # of these: the task, the turn
        self.aborted: list[str] = []
        self.ended: list[str] = []
        self.whole: set[str] = set()  # of these

    @handler(concurrent=True)
    async def add(self, message: Add) -> Accepted:
        request = message.request
        id_, ticket = request.request_id, request.trajectory
        self.requests.append(request)
        self.asked.append((message.domain, message.turn))
        if self.faults.hits(ticket, "proxy is silent"):
            await asyncio.Event().wait()
        await self.accepts.wait()
        self.held[id_] = message.reply_to
        if self.faults.hits(ticket, "engine fails"):
            self.node.tell(self.held.pop(id_), RequestFailed(id_, "engine e0: killed"))
        elif self.faults.hits(ticket, "engine aborts"):
            self.answer(id_, "aborted")
        elif not self.faults.hits(ticket, "engine hangs") and not self.holds(request):
            self.answer(id_)
        return Accepted("e0")

    def answer(self, id_: str, reason: FinishReason = "length") -> None:
        count = 0 if reason == "aborted" else 1
        completion = Completion(
            id_,
            np.full(count, RIGHT, np.int32),
            np.full(count, -0.5, np.float32),
            np.full(count, self.version, np.int32),
            reason,
        )
        self.node.tell(self.held.pop(id_), Finished("e0", [completion]))

    @handler
    async def abort(self, message: Abort) -> None:
        self.aborted.append(message.request_id)
        if message.request_id not in self.held:
            return
        if self.faults.hits(message.request_id.partition("/")[0], "engine dies"):
            self.node.tell(self.held.pop(message.request_id), RequestFailed(message.request_id, "engine e0: killed"))
        else:
            self.answer(message.request_id, "aborted")

    @handler
    async def trajectory_ended(self, message: TrajectoryEnded) -> None:
        self.ended.append(message.trajectory)
        if message.whole:
            self.whole.add(message.trajectory)


class ScriptedReward(Actor):
    """The environment's return, times ten."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.gate = asyncio.Event()
        self.gate.set()
        self.scoring: list[str] = []

    @handler(concurrent=True)
    async def score(self, message: Score) -> Scored:
        ticket = message.trajectory.ticket
        self.scoring.append(ticket)
        await self.gate.wait()
        if self.faults.hits(ticket, "reward raises"):
            raise ZeroDivisionError("no reward")
        if self.faults.hits(ticket, "reward hangs"):
            await asyncio.Event().wait()
        if self.faults.hits(ticket, "reward is NaN"):
            return Scored(float("nan"))
        return Scored(10 * message.trajectory.env_return)


class ScriptedStore(Actor):
    """Keeps what it is given."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.gate = asyncio.Event()
        self.gate.set()
        self.storing: list[str] = []
        self.kept: dict[str, Trajectory] = {}
        self.discarded: list[str] = []

    @handler(concurrent=True)
    async def store(self, message: Store) -> Stored:
        ticket = message.trajectory.ticket
        self.storing.append(ticket)
        await self.gate.wait()
        if self.faults.hits(ticket, "store raises"):
            raise OSError("no space left on device")
        if self.faults.hits(ticket, "store hangs"):
            await asyncio.Event().wait()
        self.kept[ticket] = message.trajectory
        return Stored()

    @handler
    async def discard(self, message: Discard) -> Discarded:
        self.discarded += message.tickets
        return Discarded()


class Coordinator(Actor):
    """Notes every outcome."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.left: list[str] = []

    @handler
    async def left_places(self, message: LeftPlaces) -> None:
        self.left += message.tickets

    @handler
    async def take(self, message: Outcome) -> Noted:
        self.outcomes.append(message)
        return Noted()


class World:
    """What a test gets to see."""

    def __init__(self, node: Node, worker_node: Node) -> None:
        self.node = node
        self.worker_node = worker_node
        self.faults = Faults()
        self.coordinator = Coordinator()
        self.proxy = ScriptedProxy(self.faults)
        self.worker = ScriptedWorker(self.faults)
        self.reward = ScriptedReward(self.faults)
        self.store = ScriptedStore(self.faults)
        self.pool: ScriptedPool
        self.peers: Peers
        self.host: Ref

    def start(
        self,
        *tickets: str,
        faults: dict[str, str] | None = None,
        purpose: Any = "train",
        more: bool = False,
        from_version: int = 0,
        stream: str = "",
    ) -> None:
        self.faults.of.update(faults or {})
        temperature = 1.0 if purpose == "train" else 0.0
        made = [Ticket(id_, 1, 2, purpose, temperature, 100, from_version, stream=stream) for id_ in tickets]
        self.node.tell(self.host, Start(made, more))

    @property
    def outcomes(self) -> list[Outcome]:
        return self.coordinator.outcomes

    async def describe(self) -> EnvState:
        return await self.node.ask(self.host, DescribeEnv(), EnvState, timeout_s=5)

    async def states(self) -> dict[str, str]:
        return {running.ticket: running.state for running in (await self.describe()).running}


@asynccontextmanager
async def world(
    *,
    concurrent: int = 8,
    max_turns: int = 20,
    step_timeout_s: float = 5.0,
    turn_timeout_s: float = 5.0,
    reward_timeout_s: float = 5.0,
    network: SimulatedNetwork | None = None,
    proxies: Proxies | None = None,
) -> AsyncIterator[World]:
    """``network``: of nodes that are simulated; else they are real ones. ``proxies``: others than the scripted one."""
    services, worker_node, node = (
        Node(name, transport=None if network is None else network.join(name))
        for name in ("services", "worker-0", "control")
    )
    async with services, worker_node, node:
        made = World(node, worker_node)
        made.pool = ScriptedPool(await worker_node.spawn(lambda: made.worker, "worker"))
        peers = made.peers = Peers(
            coordinator=await node.spawn(lambda: made.coordinator, "coordinator"),
            proxies=proxies or await node.spawn(lambda: made.proxy, "proxy"),
            reward=await services.spawn(lambda: made.reward, "reward"),
            store=await services.spawn(lambda: made.store, "store"),
        )
        host = EnvHost(
            EnvironmentSettings(name="game", max_turns=max_turns, step_timeout_s=step_timeout_s),
            RolloutSettings(turn_timeout_s=turn_timeout_s),
            concurrent=concurrent,
            reward_timeout_s=reward_timeout_s,
            framing=TextFraming(ByteTokenizer()),
            pool=made.pool,
            peers=peers,
        )
        made.host = await node.spawn(lambda: host, "env", restarts=0)
        yield made


@asynccontextmanager
async def simulated_world(**settings: Any) -> AsyncIterator[World]:
    """In virtual time, where nothing but what hangs ever reaches a deadline."""
    async with world(network=SimulatedNetwork(seed=1, link=Link(latency_s=0.005)), **settings) as made:
        yield made


async def outcome_of(made: World, ticket: str) -> tuple[str, str]:
    """State and reason, once it has ended; checks that it has ended once."""
    await until(lambda: any(outcome.ticket == ticket for outcome in made.outcomes))
    await settle()
    (outcome,) = [outcome for outcome in made.outcomes if outcome.ticket == ticket]
    return outcome.state, outcome.reason


async def is_at_rest(made: World) -> None:
    """Nothing is left of any trajectory: environments closed, prefixes forgotten, places free."""
    await until(lambda: set(made.worker.closed) >= set(made.worker.steps))
    state = await made.describe()
    assert state.running == []


async def followed(made: World, ticket: str) -> list[Followed]:
    return [step async for step in made.node.stream(made.host, FollowTrajectory(ticket), timeout_s=10)]
