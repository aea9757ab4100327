"""An env host whose environment is an agent, among scripted peers; agents ask its endpoint over real HTTP."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from actors.core import Node, Ref
from actors.env.agents.bench import AgentBench
from actors.env.agents.conversation import Renderer
from actors.env.agents.play import Sessions
from actors.env.agents.protocol import Result, Session
from actors.env.agents.server import HttpEndpoint
from actors.env.agents.session import Rules
from actors.env.framing import TextFraming
from actors.env.manager import EnvHost
from actors.env.messages import DescribeEnv, EnvState, Outcome, Start, Ticket
from actors.env.peers import Peers
from actors.env.tokenizers import ByteTokenizer
from actors.env.worker import AgentWorker
from actors.settings import AgentSettings, EnvironmentSettings, RolloutSettings
from tests.env_manager.support import Coordinator, Faults, ScriptedPool, ScriptedProxy, ScriptedReward, ScriptedStore
from tests.support.loops import until

CHAT = "/chat/completions"
ASK = {"messages": [{"role": "user", "content": "left or right?"}]}

playing: list[Callable[[Session], Any]] = []
"""The agent of the test that runs, which its worker finds by import path."""


def play(session: Session) -> Any:
    return playing[-1](session)


def post(session: Session, path: str = CHAT, body: Any = ASK) -> tuple[int, Any]:
    """Status and JSON of an answer, errors included."""
    return ask(session, "POST", path, body)


def ask(session: Session, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """The same, by any method."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {session.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(session.base_url + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


class Meeting:
    """Where a test and its agent, which runs in a thread, wait for each other."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.saw: list[Any] = []

    def wait(self) -> None:
        if not self.may_go_on.wait(10):
            raise TimeoutError("the test has not let its agent go on")


class World:
    """What a test gets to see."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.faults = Faults()
        self.coordinator = Coordinator()
        self.proxy = ScriptedProxy(self.faults)
        self.reward = ScriptedReward(self.faults)
        self.store = ScriptedStore(self.faults)
        self.pool: ScriptedPool
        self.host: Ref

    def start(self, *tickets: str, faults: dict[str, str] | None = None, purpose: Any = "train") -> None:
        self.faults.of.update(faults or {})
        temperature = 1.0 if purpose == "train" else 0.0
        self.node.tell(self.host, Start([Ticket(id_, 1, 2, purpose, temperature, 100) for id_ in tickets]))

    async def outcome(self, ticket: str) -> Outcome:
        """Once it has ended."""
        await until(lambda: any(outcome.ticket == ticket for outcome in self.coordinator.outcomes))
        (outcome,) = [outcome for outcome in self.coordinator.outcomes if outcome.ticket == ticket]
        return outcome

    async def counters(self) -> dict[str, int]:
        return (await self.node.ask(self.host, DescribeEnv(), EnvState, timeout_s=5)).counters


@asynccontextmanager
async def world(
    agent: Callable[[Session], Any],
    *,
    max_turns: int = 20,
    max_model_len: int = 512,
    max_tokens: int = 4,
    directory: Path | None = None,
    **settings: Any,
) -> AsyncIterator[World]:
    """``directory``: of guests; ``settings``: of ``AgentSettings``."""
    environment = EnvironmentSettings(
        name="tests.agents.support:play", max_turns=max_turns, agent=AgentSettings(**{"timeout_s": 10.0, **settings})
    )
    playing.append(agent)
    with ThreadPoolExecutor(1) as thread:
        async with Node("services") as services, Node("worker-0") as worker_node, Node("control") as node:
            made = World(node)
            worker = AgentWorker(AgentBench(environment, Path.cwd()), thread)
            made.pool = ScriptedPool(await worker_node.spawn(lambda: worker, "worker"))
            peers = Peers(
                coordinator=await node.spawn(lambda: made.coordinator, "coordinator"),
                proxies=await node.spawn(lambda: made.proxy, "proxy"),
                reward=await services.spawn(lambda: made.reward, "reward"),
                store=await services.spawn(lambda: made.store, "store"),
            )
            rules = Rules(
                model="tiny",
                temperature=1.0,
                max_turns=max_turns,
                max_tokens=max_tokens,
                max_model_len=max_model_len,
                vocabulary=264,
            )
            assert environment.agent is not None
            host = EnvHost(
                environment,
                RolloutSettings(turn_timeout_s=5.0),
                concurrent=8,
                reward_timeout_s=5.0,
                framing=TextFraming(ByteTokenizer()),
                pool=made.pool,
                peers=peers,
                sessions=Sessions(
                    environment.agent, rules, Renderer(ByteTokenizer(), environment.agent.tool_calls), directory
                ),
                endpoint=HttpEndpoint(),
            )
            made.host = await node.spawn(lambda: host, "env", restarts=0)
            try:
                yield made
            finally:
                playing.pop()


def asks(times: int = 1, reward: float = 1.0) -> Callable[[Session], Result]:
    """An agent that goes on with one conversation."""

    def agent(session: Session) -> Result:
        messages: list[Any] = [*ASK["messages"]]
        for _ in range(times):
            status, answer = post(session, body={"messages": messages})
            if status != 200:
                raise RuntimeError(f"{status}: {answer['error']['message']}")
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "and now?"}]
        return Result(reward, metrics={"asked": float(times)})

    return agent
