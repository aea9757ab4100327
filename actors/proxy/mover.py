"""Moves trajectories from one engine to another, by order of the coordinator (``coordinator.scheduling.hotspots``).

    chosen --idle or not sent yet--> the target has it at once
           --with the source--> HostRelease --Released--> the target goes on from the tokens that it has
                                    |
                                    +-- answered meanwhile: missing in Released, nothing is left to be moved
                                    +-- the source dies: its requests are moved as those of any dead engine
                                    +-- no answer: the target goes on from what is known; the first answer counts

Invariant: a request that leaves is in the source's ``in_flight`` until the source has let it go, and in the same turn
of the loop then in another engine's, or in the queue; so it is never lost, and none goes on at two engines unless one
of them has not answered. Which ones go, and what is remembered, is ``actors.proxy.moving``'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from actors.core import Node
from actors.proxy.engines.protocol import Begun
from actors.proxy.entry import EngineEntry
from actors.proxy.kept import Kept, with_begun
from actors.proxy.messages import Add, HostRelease, MoveTrajectories, Moving, Released
from actors.proxy.moving import KEEP_S, Held, Moves, pick, surplus, waiting
from actors.proxy.prefixes import Prefixes
from bus.message import BusError

log = logging.getLogger(__name__)

T = TypeVar("T")

RELEASE_TIMEOUT_S = 60.0
"""How long an engine may take to let requests go, which is a step as a rule. One that is silent for long is dead before
that (``actors.proxy.fleet``)."""
RELEASE_RETRIES = 3


class Hands(Protocol):
    """What moves need of the proxy."""

    node: Node

    def route(self, message: Add) -> str: ...

    def fail(self, add: Add, reason: str) -> None: ...

    def answer_aborted(self, add: Add) -> None: ...

    def tell_forget(self, engine: EngineEntry, trajectory: str) -> None: ...

    def ask_host(
        self, engine: EngineEntry, message: msgspec.Struct, reply: type[T], timeout_s: float, *, retries: int = 0
    ) -> Awaitable[T]: ...


class Mover:
    """See the module docstring. The tables are the proxy's."""

    def __init__(
        self, prefixes: Prefixes, where: dict[str, str], kept: Kept, counters: Counter[str], hands: Hands
    ) -> None:
        self._prefixes = prefixes
        self._where = where
        self._kept = kept
        self._counters = counters
        self._hands = hands
        self._moves = Moves()
        self._leaving: dict[str, bool] = {}  # requests that an engine was told to let go -> aborted meanwhile

    # ---- what the proxy tells and asks ---------------------------------------------------------------------------

    def barred(self, trajectory: str) -> str | None:
        """The engine that a trajectory must not go back to yet."""
        return self._moves.barred(trajectory, _now()) if self._moves.remembers(trajectory) else None

    def ago(self, engine: str) -> tuple[float | None, float | None]:
        """Seconds since it last gave, and took; None: never."""
        return self._moves.ago(engine, _now())

    def aborted(self, request_id: str) -> None:
        """Its engine may have let it go already, and would then not answer."""
        if request_id in self._leaving:
            self._leaving[request_id] = True

    def ended(self, trajectory: str) -> None:
        self._moves.ended(trajectory)

    def gone(self, engine: str) -> None:
        """It died."""
        self._moves.gone(engine)

    # ---- more than its share -------------------------------------------------------------------------------------

    def release(self, serving: Sequence[EngineEntry]) -> dict[str, int]:
        """Let engines that have more than their share of the trajectories forget some that ask for nothing just now.
        Returns how many, by engine."""
        held: dict[str, list[str]] = {engine.name: [] for engine in serving}
        for trajectory, name in self._prefixes.holder.items():
            if name in held:
                held[name].append(trajectory)
        beyond = surplus(
            {name: len(trajectories) for name, trajectories in held.items()},
            {engine.name: engine.limits.max_sequences for engine in serving},
        )
        released: dict[str, int] = {}
        for engine in serving:
            asking = {add.request.trajectory for add in engine.in_flight.values()}
            idle = [trajectory for trajectory in held[engine.name] if trajectory not in asking]
            for trajectory in idle[: beyond.get(engine.name, 0)]:
                self._prefixes.lost(trajectory)
                self._hands.tell_forget(engine, trajectory)
                released[engine.name] = released.get(engine.name, 0) + 1
        self._counters["trajectories_released"] += sum(released.values())
        return released

    # ---- an order ------------------------------------------------------------------------------------------------

    def order(self, source: EngineEntry, target: EngineEntry, message: MoveTrajectories) -> Moving:
        """Begin to carry it out."""
        held = self._held_by(source)
        reason, refused = _why_not(source, target)
        if not reason and not held:
            reason, refused = "nothing_to_move", f"engine {source.name} has no trajectory that was not moved lately"
        if reason:
            self._counters[f"moves_refused_{reason}"] += 1
            return Moving(refused=refused)
        chosen = pick(held, waiting(source.in_flight, source.limits.max_sequences), message.trajectories)
        emptied = round(len(chosen) * len(source.in_flight) / len(held))
        self._moves.note([one.trajectory for one in chosen], source.name, target.name, emptied, _now())
        self._recount(source)
        asyncio.get_running_loop().call_later(KEEP_S, self._recount, source)
        moving = self._send_away(chosen, source, target)
        log.info("from engine %s to %s: %s (%s)", source.name, target.name, moving, message.why)
        return moving

    def _held_by(self, engine: EngineEntry) -> list[Held]:
        """Its trajectories that may be moved."""
        requests: dict[str, list[Add]] = {}
        for add in engine.in_flight.values():
            requests.setdefault(add.request.trajectory, []).append(add)
        return [
            Held(trajectory, self._prefixes.tokens(trajectory), requests.get(trajectory, ()))
            for trajectory in self._prefixes.of(engine.name)
            if self.barred(trajectory) is None
        ]

    def _recount(self, engine: EngineEntry) -> None:
        engine.emptied = self._moves.emptied(engine.name, _now())

    def _send_away(self, chosen: list[Held], source: EngineEntry, target: EngineEntry) -> Moving:
        unsent = {add.request.request_id for add in source.outbox}
        # While versions differ, during a swap, tokens could not go along: then those requests end where they are.
        abreast = source.version is not None and target.version is not None and target.version >= source.version
        idle, at_once, asked = 0, 0, []
        for one in chosen:
            self._prefixes.move(one.trajectory, target)
            self._hands.tell_forget(source, one.trajectory)
            idle += not one.requests
            for add in one.requests:
                if add.request.request_id in unsent:
                    at_once += 1
                    source.outbox = [other for other in source.outbox if other is not add]
                    self._move_on(source, add)
                elif abreast:
                    asked.append(add.request.request_id)
        self._counters.update(moves_ordered=1, moved_idle=idle, moved_unsent=at_once)
        if asked:
            self._leaving |= dict.fromkeys(asked, False)
            self._hands.node.background(self._release(source, asked))
        return Moving(idle, at_once, len(asked))

    async def _release(self, source: EngineEntry, ids: list[str]) -> None:
        """Have an engine let requests go, and let others go on with them."""
        try:
            released = await self._ask(source, ids)
            for id_, begun in released.items():
                add = source.in_flight.get(id_)
                if add is not None:
                    self._let_go(source, add, begun)
        finally:
            for id_ in ids:
                self._leaving.pop(id_, None)

    async def _ask(self, source: EngineEntry, ids: list[str]) -> Mapping[str, Begun | None]:
        """What was let go, with what it had; all of it, as far as is known, where no answer comes."""
        host = source.host
        order = HostRelease(ids)
        try:
            answer = await self._hands.ask_host(source, order, Released, RELEASE_TIMEOUT_S, retries=RELEASE_RETRIES)
        except BusError as error:
            log.warning("engine %s has not let %d requests go: %s", source.name, len(ids), error)
            if source.host is None or source.host is not host:  # its death has moved them
                return {}
            self._counters["moves_unanswered"] += 1
            return dict.fromkeys(ids)
        return {one.request_id: one.begun for one in answer.requests}

    def _let_go(self, source: EngineEntry, add: Add, begun: Begun | None) -> None:
        id_ = add.request.request_id
        if begun is not None:
            add = with_begun(add, begun)
        if self._leaving[id_]:
            source.take(id_)
            self._hands.answer_aborted(add)
        elif add.request.trajectory not in self._prefixes.holder:
            source.take(id_)
            self._hands.fail(add, "its trajectory has ended")
        else:
            tokens = 0 if begun is None else len(begun.tokens)
            self._counters["moved_running" if tokens else "moved_waiting"] += 1
            self._counters["moved_tokens"] += tokens
            self._move_on(source, add)

    def _move_on(self, source: EngineEntry, add: Add) -> None:
        id_ = add.request.request_id
        source.take(id_)
        del self._where[id_]
        self._hands.route(self._kept.along(add))


def _why_not(source: EngineEntry, target: EngineEntry) -> tuple[str, str]:
    """Under which reason nothing can be moved from one to the other, and in words; nothing if something can."""
    if source is target:
        return "same_engine", f"engine {source.name} is both source and target"
    if target.state != "serving":
        return "target_not_serving", f"engine {target.name}, which is to receive, is {target.state}"
    if source.state not in ("serving", "suspended"):
        return "source_not_serving", f"engine {source.name}, which is to give, is {source.state}"
    return "", ""


def _now() -> float:
    return asyncio.get_running_loop().time()
