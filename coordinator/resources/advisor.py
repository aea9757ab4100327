"""A language model that is asked for advice: one of the run's own engines, through its proxy, as anybody asks it.

Invariant: a question takes no place that a trajectory needs for longer than its answer takes, and is forgotten by the
engine when it is answered or given up; nothing is learned from it (``ADVICE``).
"""

from __future__ import annotations

import asyncio
import itertools

import numpy as np

from actors.core import Actor, handler
from actors.env.framing import Framing
from actors.proxy.engines.protocol import Completion, GenerateRequest
from actors.proxy.messages import ADVICE, Abort, Accepted, Add, Finished, RequestFailed, TrajectoryEnded
from coordinator.engines import Engines

ADD_TIMEOUT_S = 10.0
LONGEST_ANSWER = 512
"""Tokens."""


class NoAnswer(RuntimeError):
    """No engine answers, and why."""


class EngineAdvisor(Actor):
    """See the module docstring. ``ask`` is called in this process."""

    def __init__(self, engines: Engines, framing: Framing, max_model_len: int) -> None:
        self._engines = engines
        self._framing = framing
        self._max_model_len = max_model_len
        self._numbers = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[Completion]] = {}

    @handler
    async def finished(self, message: Finished) -> None:
        for completion in message.completions:
            future = self._waiting.pop(completion.request_id, None)
            if future is not None and not future.done():
                future.set_result(completion)

    @handler
    async def failed(self, message: RequestFailed) -> None:
        future = self._waiting.pop(message.request_id, None)
        if future is not None and not future.done():
            future.set_exception(NoAnswer(message.reason))

    async def ask(self, text: str) -> str:
        """What the model says to a text, greedily. Raises ``NoAnswer`` and ``BusError``; waits as long as it is let."""
        prompt = np.asarray(self._framing.opening("", text), np.int32)
        room = min(LONGEST_ANSWER, self._max_model_len - len(prompt))
        if room < 1:
            raise NoAnswer(
                f"the question has {len(prompt)} tokens, and engines hold {self._max_model_len} with the answer:"
                f" rollout.max_model_len has to be larger"
            )
        name = f"{ADVICE}-{next(self._numbers)}"
        request = GenerateRequest(
            f"{name}/0", name, prompt, room, temperature=0.0, stop_token_ids=tuple(self._framing.tokenizer.eos_ids)
        )
        state = await self._engines.describe(ADD_TIMEOUT_S)
        serving = [engine for engine in state.engines if engine.state == "serving"]
        if not serving:
            raise NoAnswer("no engine serves just now")
        proxy = self._engines.proxy_of(min(serving, key=lambda engine: engine.in_flight))
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = future
        try:
            add = Add(request, self.ref, ADVICE)
            await self.node.ask(proxy, add, Accepted, timeout_s=ADD_TIMEOUT_S, retries=2)
            return self._framing.action((await future).tokens)
        finally:
            if self._waiting.pop(request.request_id, None) is not None:
                self.node.tell(proxy, Abort(request.request_id))
            self.node.tell(proxy, TrajectoryEnded(name))
