"""Prefill on some hardware classes, decode on the others: which engines a request may be decoded on, and which one
computes its prompt first.

Invariant: engines that prefill are given whole requests only where no other serves; a prompt is sent to one of them
only where that saves the decoding engine ``min_tokens`` or more, and one with the same version serves. So the split is
given by the classes, and what goes through it by the load: the engine that was least occupied when it last said so.
"""

from __future__ import annotations

from actors.core import Ref
from actors.proxy.engines.protocol import GenerateRequest
from actors.proxy.entry import EngineEntry
from actors.proxy.pool import Group, Pool
from actors.settings import SplitSettings


class Splitter:
    """See the module docstring. ``split``: None, and every engine takes whole requests."""

    def __init__(self, split: SplitSettings | None, pool: Pool) -> None:
        self._split = split
        self._pool = pool
        self._at: dict[str, Ref] = {}  # request that is not sent yet -> the host that computes its prompt
        self._given: dict[str, int] = {}  # engine -> prompts since it last said how occupied it is

    def decoding(self, groups: list[Group]) -> list[Group]:
        """Those that a request is decoded on."""
        if self._split is None:
            return groups
        return [group for group in groups if group.hardware_class not in self._split.prefill] or groups

    def give(self, request: GenerateRequest, engine: EngineEntry, cached: int) -> bool:
        """A request goes to an engine that has ``cached`` tokens of it: whether another computes its prompt."""
        self._at.pop(request.request_id, None)
        known = len(request.prompt) + (0 if request.begun is None else len(request.begun.tokens))
        if self._split is None or engine.hardware_class in self._split.prefill:
            return False
        if known - cached < self._split.min_tokens:
            return False
        able = [
            (self._occupancy(one), one.name, one.host)
            for one in self._pool.engines.values()
            if one.hardware_class in self._split.prefill and one.state == "serving" and one.version == engine.version
        ]
        _, name, host = min(able, key=lambda each: each[:2], default=(0.0, "", None))
        if host is None:
            return False
        self._given[name] = self._given.get(name, 0) + 1
        self._at[request.request_id] = host
        return True

    def _occupancy(self, engine: EngineEntry) -> float:
        """Of its places, those that have been given since its last report included."""
        said = 0.0 if engine.measured is None else engine.measured.occupancy
        return said + self._given.get(engine.name, 0) / engine.limits.max_sequences

    def said(self, engine: str) -> None:
        """An engine has said how occupied it is."""
        self._given.pop(engine, None)

    def at(self, requests: list[GenerateRequest]) -> list[Ref | None]:
        """For the message that takes requests to their engine; nothing where none is computed elsewhere."""
        if not self._at:
            return []
        found = [self._at.pop(request.request_id, None) for request in requests]
        return found if any(found) else []
