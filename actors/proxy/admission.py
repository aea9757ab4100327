"""What the proxy takes, before any engine sees it: wrong parameters, n completions, versions that have passed.

Invariant: what ``refusal`` lets pass can run on the engines that are known, with the words of their own refusal
(``actors.proxy.engines.validation``) where it does not.

A request for n completions becomes n requests ``ID#0`` .. ``ID#n-1`` of its trajectory, each with a seed of its own,
and each routed and answered by itself: engines compute what their requests begin with once anyhow, so n is nothing that
an engine would have to know.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from actors.proxy.engines.protocol import EngineLimits, EngineRefusal, GenerateRequest
from actors.proxy.engines.seeds import derive
from actors.proxy.engines.validation import MAX_COMPLETIONS, check, check_parameters
from actors.proxy.entry import State
from actors.proxy.messages import Add
from actors.proxy.pool import Group, Pool

REMEMBERED = 10_000
"""Requests for several completions whose parts are known by the name of the whole, the last ones."""


class Admission:
    """See the module docstring."""

    def __init__(self) -> None:
        self._known: dict[str, EngineLimits] = {}
        self._widest: EngineLimits | None = None  # what the ablest engine can; None before one is up
        self._several: OrderedDict[str, int] = OrderedDict()

    def engine_ready(self, name: str, limits: EngineLimits) -> None:
        self._known[name] = limits
        every = self._known.values()
        self._widest = EngineLimits(
            max(one.max_sequences for one in every),
            max(one.max_model_len for one in every),
            max(one.vocabulary for one in every),
            any(one.texts for one in every),
            any(one.masks for one in every),
        )

    def first(self, request: GenerateRequest) -> str:
        """The name of a request, or of its first completion."""
        return completion_ids(request.request_id, min(request.n, MAX_COMPLETIONS))[0]

    def refusal(self, request: GenerateRequest) -> str:
        """Why no engine can run a request: what was expected, what was found; nothing where one can."""
        try:
            if self._widest is None:
                check_parameters(request)
            else:
                check(request, self._widest)
        except EngineRefusal as refusal:
            return str(refusal)
        return ""

    def parts(self, add: Add) -> list[Add]:
        """The requests that it comes to."""
        request = add.request
        if not 1 < request.n <= MAX_COMPLETIONS:  # else it is one, or is to be refused as it is
            return [add]
        self._several[request.request_id] = request.n
        if len(self._several) > REMEMBERED:
            self._several.popitem(last=False)
        return [
            msgspec.structs.replace(add, request=msgspec.structs.replace(request, request_id=id_, seed=seed, n=1))
            for id_, seed in zip(
                completion_ids(request.request_id, request.n), completion_seeds(request.seed, request.n), strict=True
            )
        ]

    def ids(self, request_id: str) -> list[str]:
        """Under which the requests are known that this one came to."""
        return completion_ids(request_id, self._several.get(request_id, 1))


def completion_ids(request_id: str, n: int) -> list[str]:
    """The names of a request's completions."""
    return [request_id] if n <= 1 else [f"{request_id}#{number}" for number in range(n)]


def completion_seeds(seed: int | None, n: int) -> list[int | None]:
    """Seeds of a request's completions; a request without a seed has completions without one."""
    return [None if seed is None else derive(seed, number) for number in range(n)]


def groups_within(request: GenerateRequest, pool: Pool) -> list[Group]:
    """The engines that a request may go to: none that has a version which it excludes (``to_version``); of the others,
    where there are any, those that have one which it wants: the rest might go past it."""
    bound = request.to_version
    if bound is None:
        return pool.groups()
    states: tuple[State, ...] = ("serving", "suspended")
    for state in states:
        able = [group for group in pool.of(state) if group.version is None or group.version <= bound]
        exact = [group for group in able if group.version is not None and group.version >= request.from_version]
        if able:
            return exact or able
    return []


def is_superseded(request: GenerateRequest, pool: Pool) -> bool:
    """Whether every engine that has weights has newer ones than a request may be sampled under: none goes back."""
    return request.to_version is not None and min(pool.versions, default=request.to_version) > request.to_version
