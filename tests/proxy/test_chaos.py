"""Kills, hangs and restarts of real engines and of one of two proxies, under load: every request is answered, or fails
with a name, and each answer is the one that it would have had without them.

Two proxies, each a process of its own, with two torch engines each in processes of theirs. The weights never change,
but their version does, so that engines are suspended, reloaded and resumed in between. A request's unbroken answer
comes from an engine in this process, which nothing happens to.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from actors.core import Actor, Ref, handler
from actors.policy import Qwen3Shape, write_config
from actors.proxy.engines.protocol import Completion, EngineLimits, GenerateRequest
from actors.proxy.engines.seeds import uniforms
from actors.proxy.engines.torch_engine import TorchEngine
from actors.proxy.messages import Acknowledged, Add, Finished, ProxySet, Remove, RequestFailed
from bus.message import BusError
from tests.engines.reference import VOCABULARY, Reference, finish, prompt
from tests.proxy.gateway import GatewaySettings
from tests.proxy.operating import Operator, Site, site
from tests.support.loops import run

REQUESTS = 2_000
IN_FLIGHT = 72
DISTINCT = 200
TOKENS = (20, 61)
LIMITS = EngineLimits(max_sequences=16, max_model_len=128)
SILENCE_S = 8.0
PROXY_SILENCE_S = 20.0
ANSWER_TIMEOUT_S = 240.0
LIMIT_S = 2_400.0

DECK = {
    "kill an engine": 40,
    "stop an engine for a moment": 30,
    "stop an engine for good": 12,
    "remove an engine": 4,
    "kill a proxy": 6,
    "stop a proxy for a moment": 5,
    "stop a proxy for good": 3,
}
"""What happens, and how often: 100 in all. Of the proxies to the second one alone."""


def some_request(index: int) -> GenerateRequest:
    """The ``index``-th of those that are distinct: a third is greedy, the others have seeds."""
    chance = random.Random(index)
    greedy = index % 3 == 0
    return GenerateRequest(
        request_id=f"d{index}",
        trajectory=f"d{index}",
        prompt=prompt(chance.randrange(4, 60), index),
        max_tokens=chance.randrange(*TOKENS),
        temperature=0.0 if greedy else 1.0,
        seed=None if greedy else index,
    )


class Client(Actor):
    """Asks as an env host does: the proxy that the ring says; another one when that is gone."""

    def __init__(self, operator: Operator) -> None:
        self._proxies = operator.proxies
        self._proxies.on_follow(self._others)
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._added: dict[str, Add] = {}
        self._at: dict[str, Ref] = {}
        self.answers: dict[str, Completion] = {}
        self.failures: dict[str, str] = {}
        self.asked = 0
        self.late: list[Completion] = []
        self.asked_again = 0

    @handler
    async def finished(self, message: Finished) -> None:
        for completion in message.completions:
            future = self._waiting.get(completion.request_id)
            if future is None or future.done():
                self.late.append(completion)
            else:
                future.set_result(completion)

    @handler
    async def failed(self, message: RequestFailed) -> None:
        future = self._waiting.get(message.request_id)
        if future is not None and not future.done():
            future.set_exception(RuntimeError(message.reason))

    async def play(self, until_done: asyncio.Event) -> None:
        """One request after the other, until there were enough and nothing happens any more."""
        while self.asked < REQUESTS or not until_done.is_set():
            id_ = f"r{self.asked}"
            self.asked += 1
            await self._one(id_, some_request(int(id_[1:]) % DISTINCT))

    async def _one(self, id_: str, request: GenerateRequest) -> None:
        future = self._waiting[id_] = asyncio.get_running_loop().create_future()
        add = Add(msgspec.structs.replace(request, request_id=id_, trajectory=id_), self.ref)
        self._added[id_] = add
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._ask(add)
                self.answers[id_] = await future
        except TimeoutError:
            self.failures[id_] = "no answer"
        except (BusError, RuntimeError) as error:
            self.failures[id_] = str(error)
        finally:
            for table in (self._waiting, self._added, self._at):
                table.pop(id_, None)
            self._proxies.ended(self.node, id_, whole=True)

    async def _ask(self, add: Add) -> None:
        while True:
            proxy = await self._proxies.add(self.node, add, timeout_s=10.0, retries=3)
            if self._proxies.has(proxy):
                self._at[add.request.request_id] = proxy
                return

    def _others(self, found: ProxySet) -> None:
        there = {member.ref for member in found.members}
        for id_ in [id_ for id_, proxy in self._at.items() if proxy not in there]:
            del self._at[id_]
            self.asked_again += 1
            self.node.background(self._again(id_))

    async def _again(self, id_: str) -> None:
        try:
            await self._ask(self._added[id_])
        except BusError as error:
            future = self._waiting.get(id_)
            if future is not None and not future.done():
                future.set_exception(error)


class Chaos:
    """What is done to a site, in an order that the seed says."""

    def __init__(self, made: Site, seed: int) -> None:
        self._site = made
        self._operator = made.operator
        self._chance = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.left_behind: list[psutil.Process] = []  # engines of proxies that were killed

    async def run(self, client: Client) -> None:
        deck = [what for what, count in DECK.items() for _ in range(count)]
        self._chance.shuffle(deck)
        for number, what in enumerate(deck):
            due = REQUESTS * number // len(deck) - IN_FLIGHT
            await until_slowly(lambda due=due: len(client.answers) + len(client.failures) >= due)  # type: ignore[misc]
            await asyncio.sleep(self._chance.uniform(0.5, 2.0))
            await self._do(what)
            self.done[what] += 1

    async def _do(self, what: str) -> None:
        first, second = self._operator.names
        if what.endswith("an engine") or "an engine" in what:
            engine = await self._an_engine()
            if what == "remove an engine":
                await self._remove(self._chance.choice([first, second]))
            elif what == "stop an engine for a moment":
                await self._stop(engine, self._chance.uniform(0.2, 2.0))
            else:
                _send(engine, signal.SIGKILL if what == "kill an engine" else signal.SIGSTOP)
            return
        await until_slowly(lambda: second in self._operator.children and self._operator.children[second].running)
        proxy = psutil.Process(self._operator.children[second].pid)
        if what == "stop a proxy for a moment":
            await self._stop(proxy, self._chance.uniform(0.2, 2.0))
            return
        engines = list(self._operator.engines(second).values())
        deaths = self._operator.deaths[second]
        _send(proxy, signal.SIGKILL if what == "kill a proxy" else signal.SIGSTOP)
        await until_slowly(lambda: self._operator.deaths[second] > deaths)
        self.left_behind += engines

    async def _an_engine(self) -> psutil.Process:
        while True:
            engines = [one for name in self._operator.names for one in self._operator.engines(name).values()]
            if engines:
                return self._chance.choice(sorted(engines, key=lambda one: one.pid))
            await asyncio.sleep(0.2)

    async def _stop(self, process: psutil.Process, seconds: float) -> None:
        _send(process, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        _send(process, signal.SIGCONT)

    async def _remove(self, name: str) -> None:
        """An engine that is not the last one of its proxy; only a new proxy brings it back."""
        for state in await self._operator.describe():
            left = [engine.name for engine in state.engines if engine.state != "removed"]
            if left and left[0].startswith(name) and len(left) > 1:
                ref = next(ref for ref in self._operator.proxies.refs if ref.node.name == name)
                order = Remove(self._chance.choice(left), "an operator's order")
                await self._site.node.ask(ref, order, Acknowledged, timeout_s=30.0, retries=3)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return  # it died of something else


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until_slowly(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110  (processes are looked at)
        await asyncio.sleep(0.1)


async def _publish(made: Site) -> None:
    while True:
        await asyncio.sleep(10.0)
        await made.next_version()


async def _storm(directory: Path, reference: Reference, seed: int) -> tuple[Client, Chaos, dict[str, int], list[str]]:
    settings = GatewaySettings(
        kind="torch",
        policy_directory=str(directory / "policy"),
        limits=LIMITS,
        restarts=1_000,
        silence_s=SILENCE_S,
        tokens_every_s=0.1,
    )
    async with site(directory, ["proxy-0", "proxy-1"], settings, reference, PROXY_SILENCE_S) as made:
        client, chaos, over = Client(made.operator), Chaos(made, seed), asyncio.Event()
        await made.node.spawn(lambda: client, "client", restarts=0)
        publishing = asyncio.ensure_future(_publish(made))
        playing = [asyncio.ensure_future(client.play(over)) for _ in range(IN_FLIGHT)]
        await chaos.run(client)
        over.set()
        await asyncio.gather(*playing)
        publishing.cancel()
        states = await made.operator.describe()
        counters: Counter[str] = Counter()
        for state in states:
            counters.update(state.counters)
        held = [f"{state.queued} queued" for state in states if state.queued]
        everybody = psutil.Process().children(recursive=True)
    left = [one.name() for one in psutil.wait_procs(everybody, timeout=5)[1]]
    return client, chaos, dict(counters), held + left


def _unbroken(policy_dir: Path, reference: Reference) -> dict[int, Completion]:
    engine = TorchEngine(policy_dir, max_sequences=LIMITS.max_sequences, max_model_len=LIMITS.max_model_len)
    engine.load_weights(0, reference.weights(0))
    for index in range(DISTINCT):
        engine.add(some_request(index))
    answers = finish(engine, limit=10**6)
    engine.close()
    return {index: answers[f"d{index}"] for index in range(DISTINCT)}


def _is_close_call(reference: Reference, request: GenerateRequest, found: Completion, expected: Completion) -> bool:
    """Whether two continuations part where rounding decides: at equal logits, or a draw between two tokens."""
    place = int(np.flatnonzero(found.tokens != expected.tokens)[0])
    logits = reference.logits(0, np.concatenate([request.prompt, expected.tokens[:place]]))[-1].double().numpy()
    one, other = int(found.tokens[place]), int(expected.tokens[place])
    if not request.temperature:
        return bool(abs(logits[one] - logits[other]) < 1e-3)
    ends = np.cumsum(np.exp(logits - logits.max()))
    ends /= ends[-1]
    drawn = float(uniforms(np.array([request.seed]), np.array([place]))[0])
    return bool(min(abs(drawn - ends[one]), abs(drawn - (ends[one - 1] if one else 0.0))) < 1e-4)


@pytest.mark.deep
def test_chaos_among_engines_and_proxies_loses_no_request_and_changes_no_token(tmp_path: Path) -> None:
    shape = Qwen3Shape(vocab_size=VOCABULARY, max_positions=1024)
    write_config(shape, tmp_path / "policy")
    path = tmp_path / "policy" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 1, "pad_token_id": 0}))
    reference = Reference(tmp_path / "policy", versions=(0,))
    client, chaos, counters, left = run(_storm(tmp_path, reference, seed=7), LIMIT_S)
    unbroken = _unbroken(tmp_path / "policy", reference)
    print(f"\n{client.asked} requests, {len(client.answers)} answers, {len(client.late)} late, {chaos.done}")
    print(f"asked again: {client.asked_again}; {counters}; failures: {client.failures}")
    assert chaos.done == DECK
    assert (left, [engine.pid for engine in chaos.left_behind if _alive(engine)]) == ([], [])
    assert client.asked >= REQUESTS
    assert len(client.answers) + len(client.failures) == client.asked
    assert not set(client.answers) & set(client.failures)
    assert all(client.failures.values())
    assert "no answer" not in client.failures.values()
    assert len(client.failures) <= client.asked // 100, client.failures
    close_calls = 0
    for id_, found in [*client.answers.items(), *((late.request_id, late) for late in client.late)]:
        index = int(id_[1:]) % DISTINCT
        expected = unbroken[index]
        assert np.all(np.diff(found.versions) >= 0), id_
        assert found.finish_reason == expected.finish_reason, id_
        assert len(found.tokens) == len(found.logprobs) == len(expected.tokens), id_
        if found.tokens.tolist() != expected.tokens.tolist():
            close_calls += 1
            assert _is_close_call(reference, some_request(index), found, expected), id_
        else:
            np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-3, err_msg=id_)
    print(f"{close_calls} close calls")
    assert counters["tokens_kept"] > 0
