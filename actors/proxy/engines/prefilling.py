"""Prompts that another engine computes first, as an engine's host sees them from either side.

    proxy --HostAdd, prefill_at--> decode host --HostPrefill--> prefill host: one token of the prompt, whose keys and
                                     |      <--Acknowledged---  values are then where both engines find them
                                     +--> its engine, which loads what it finds and computes the rest

Invariant: a request joins its own engine once, whatever comes of the prefill: done, refused, lost or late. So a split
only ever costs time, and what is sampled is what the one engine samples.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import numpy as np

from actors.core import Node, Ref
from actors.proxy.engines.protocol import Completion, GenerateRequest
from actors.proxy.messages import Acknowledged, HostPrefill
from bus.message import BusError

log = logging.getLogger(__name__)

PREFILL_TIMEOUT_S = 30.0
"""How long a request waits for another engine before its own computes the prompt."""


class AwaitedPrefills:
    """At the host of an engine that decodes."""

    def __init__(self, name: str, add: Callable[[GenerateRequest], None]) -> None:
        self._name = name
        self._add = add
        self._waiting: dict[str, GenerateRequest] = {}

    def begin(self, node: Node, request: GenerateRequest, at: Ref) -> None:
        self._waiting[request.request_id] = request
        node.background(self._wait(node, request, at))

    async def _wait(self, node: Node, request: GenerateRequest, at: Ref) -> None:
        order = HostPrefill(_prompt_alone(request, self._name))
        about = f"the prompt of request {request.request_id}"
        try:
            await node.ask(at, order, Acknowledged, timeout_s=PREFILL_TIMEOUT_S, about=about)
        except BusError as error:
            log.warning("engine %s computes %s itself: %s", self._name, about, error)
        if self._waiting.get(request.request_id) is request:
            del self._waiting[request.request_id]
            self._add(request)

    def take_out(self, request_id: str) -> GenerateRequest | None:
        """It is wanted no more."""
        return self._waiting.pop(request_id, None)


class GivenPrefills:
    """At the host of an engine that prefills."""

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Future[None]] = {}

    def begin(self, request_id: str) -> asyncio.Future[None]:
        """Done once the prompt is computed. Raises ``ValueError`` for one that is under way."""
        if request_id in self._asked:
            raise ValueError(f"the prompt of {request_id} is being computed already")
        self._asked[request_id] = asyncio.get_running_loop().create_future()
        return self._asked[request_id]

    def completed(self, completion: Completion) -> bool:
        """Whether this was the token of a prompt that is computed for another engine."""
        asked = self._asked.pop(completion.request_id, None)
        if asked is not None and not asked.done():
            asked.set_result(None)
        return asked is not None

    def refused(self, request_id: str, reason: str) -> bool:
        """Whether this was one."""
        asked = self._asked.pop(request_id, None)
        if asked is not None and not asked.done():
            asked.set_exception(ValueError(reason))
        return asked is not None


def _prompt_alone(request: GenerateRequest, name: str) -> GenerateRequest:
    """The same prompt, with what has begun behind it, and one token that nobody looks at."""
    prompt = request.prompt if request.begun is None else np.concatenate([request.prompt, request.begun.tokens])
    return msgspec.structs.replace(
        request,
        request_id=f"{request.request_id} for {name}",
        prompt=prompt,
        max_tokens=1,
        begun=None,
        stop=(),
        logprobs=0,
    )
