"""Monitors and links: who is told when an actor ends, here or on another node.

Invariant: a monitor that is not cancelled ends in exactly one ``Down``, also where the actor was never there, its node
dies or restarts, or the request to watch it got lost; an entry of a watch goes with the actor, the watcher, or the
node of either, whichever ends first.

The watching node asks the other one's node actor (``WatchActor``), which tells it when the actor ends (``Ended``): both
with retries, so that a lost message delays a ``Down`` and does not lose it. Nodes on both ends of a watch ping each
other (``actors.core.liveness``); one that gives the other up refuses everything of that incarnation, so that the other
one gives it up as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from actors.core.liveness import Liveness
from actors.core.ref import Ref
from bus.message import BusError, NodeAddress, NoSuchActor, PeerRestarted

if TYPE_CHECKING:
    from actors.core.node import Node

NODE_ACTOR = "@node"
"""Every node has an actor of this name, which speaks for the node itself."""

ANSWER_S = 30.0
"""A node that does not answer a request to watch one of its actors for this long counts as lost."""

RETRIES = 14

DownKind = Literal["stopped", "failed", "linked", "no_such_actor", "node_lost", "node_restarted"]


class Down(msgspec.Struct, frozen=True):
    """To who monitors an actor: it has ended, and nothing more will come of it."""

    ref: Ref
    kind: DownKind  # "failed": more often than it may be restarted; "linked": what it was linked to had ended
    reason: str


class WatchActor(msgspec.Struct, frozen=True):
    """Tell ``watcher`` when ``actor`` ends; with ``link``, end it in turn when that one ends."""

    actor: str
    watcher: NodeAddress
    id: int
    link: Ref | None = None


class Watching(msgspec.Struct, frozen=True):
    node: NodeAddress  # the incarnation that answered


class Unwatch(msgspec.Struct, frozen=True):
    watcher: NodeAddress
    id: int


class Unwatched(msgspec.Struct, frozen=True):
    """Also where there was nothing to forget."""


class Ended(msgspec.Struct, frozen=True):
    """To a watcher."""

    id: int
    kind: DownKind
    reason: str


class EndNoted(msgspec.Struct, frozen=True):
    """The watcher has been told."""


class NodeGone(msgspec.Struct, frozen=True):
    """To the own node actor: an incarnation of a node, and all before it, is gone."""

    name: str
    epoch: int
    why: str
    restarted: bool


Notify = Callable[[Down], None]


class Monitor:
    """A watch over one actor, until its ``Down`` or until it is cancelled. Idempotent."""

    def __init__(self, ref: Ref, cancel: Callable[[], None], leave: Callable[[], None] | None = None) -> None:
        self.ref = ref
        self._cancel = cancel
        self._leave = leave or cancel

    def cancel(self) -> None:
        """No ``Down`` will come of it any more; a link is undone on both ends."""
        self._cancel()

    def leave(self) -> None:
        """The watcher has ended. The other end of a link must hear of that end, not of the link's."""
        self._leave()


class _Away:
    """A watch over an actor of another node."""

    def __init__(self, ref: Ref, notify: Notify, link: Ref | None) -> None:
        self.ref = ref
        self.notify = notify
        self.link = link
        self.held: NodeAddress | None = None  # from its answer on
        self.left = False  # the other end of a link forgets by itself


class _Here(msgspec.Struct, frozen=True):
    """Who is told of the end of an actor of this node."""

    notify: Notify
    watcher: NodeAddress | None = None
    link: Monitor | None = None


_Key = tuple[str, int, int]  # watcher's node and epoch, its number there


class Watches:
    """One node's share of all watches: what its actors watch, and who watches them."""

    def __init__(self, node: Node, liveness: Liveness) -> None:
        self._node = node
        self._liveness = liveness
        self._ids = itertools.count(1)
        self._away: dict[int, _Away] = {}
        self._here: dict[str, dict[_Key, _Here]] = {}
        self._actor_of: dict[_Key, str] = {}

    def __len__(self) -> int:
        return len(self._away) + len(self._actor_of)

    # ---- watching ------------------------------------------------------------------------------------------------

    def add(self, ref: Ref, notify: Notify, link: Ref | None = None) -> Monitor:
        """``notify`` is called once, never before this returns. ``link``: who ends the other way round, too."""
        id_ = next(self._ids)
        if self._node.hosts(ref):
            key = ("", 0, id_)
            if not self._node.has(ref.actor):
                down = Down(ref, "no_such_actor", f"there is no actor {ref.actor!r} on node {ref.node.name}")
                handle = self._node.loop.call_soon(notify, down)
                return Monitor(ref, handle.cancel)
            reverse = None if link is None else self._ending(ref, link)
            self._enter(ref.actor, key, _Here(notify, None, reverse))
            return Monitor(ref, lambda: self._remove(key))
        away = self._away[id_] = _Away(ref, notify, link)
        self._node.background(self._request(id_, away))
        return Monitor(ref, lambda: self._cancel(id_), lambda: self._leave(id_))

    def _ending(self, ref: Ref, other: Ref) -> Monitor:
        """The way back of a link: an actor of this node ends with another one."""
        return self.add(other, lambda down: self._node.end_linked(ref, down))

    async def _request(self, id_: int, away: _Away) -> None:
        there = Ref(away.ref.node, NODE_ACTOR)
        message = WatchActor(away.ref.actor, self._node.address, id_, away.link)
        try:
            watching = await self._node.ask(
                there, message, Watching, timeout_s=ANSWER_S, retries=RETRIES, about=f"monitor of {away.ref}"
            )
        except NoSuchActor as error:
            self._down(id_, "no_such_actor", str(error))
        except PeerRestarted as error:
            self._down(id_, "node_restarted", str(error))
        except BusError as error:
            self._down(id_, "node_lost", str(error))
        else:
            if id_ in self._away:
                away.held = watching.node
                self._liveness.hold(watching.node)
            elif not away.left:  # cancelled, or over, meanwhile
                await self._forget(watching.node, id_)

    def _cancel(self, id_: int) -> None:
        away = self._drop(id_)
        if away is not None and away.held is not None:
            self._node.background(self._forget(away.held, id_))

    def _leave(self, id_: int) -> None:
        away = self._away.get(id_)
        if away is not None and away.link is not None:
            away.left = True
            self._drop(id_)
        else:
            self._cancel(id_)

    async def _forget(self, there: NodeAddress, id_: int) -> None:
        """Where that cannot be said, the other node forgets with this one."""
        message = Unwatch(self._node.address, id_)
        try:
            await self._node.ask(Ref(there, NODE_ACTOR), message, Unwatched, timeout_s=ANSWER_S, retries=RETRIES)
        except BusError:
            self._node.counters["unwatch_unsent"] += 1

    def _drop(self, id_: int) -> _Away | None:
        away = self._away.pop(id_, None)
        if away is not None and away.held is not None:
            self._liveness.release(away.held)
        return away

    def _down(self, id_: int, kind: DownKind, reason: str) -> None:
        away = self._drop(id_)
        if away is not None:
            away.notify(Down(away.ref, kind, reason))

    # ---- being watched -------------------------------------------------------------------------------------------

    def watched(self, message: WatchActor) -> Watching:
        """Another node's request. Raises ``NoSuchActor``."""
        address, actor, watcher = self._node.address, message.actor, message.watcher
        if not self._node.has(actor):
            raise NoSuchActor(f"there is no actor {actor!r} on node {address.name}")
        ref = Ref(address, actor)
        reverse = None if message.link is None else self._ending(ref, message.link)

        def notify(down: Down) -> None:
            self._node.background(self._report(watcher, Ended(message.id, down.kind, down.reason)))

        self._liveness.hold(watcher)
        self._enter(actor, (watcher.name, watcher.epoch, message.id), _Here(notify, watcher, reverse))
        return Watching(address)

    def unwatched(self, message: Unwatch) -> Unwatched:
        self._remove((message.watcher.name, message.watcher.epoch, message.id))
        return Unwatched()

    def ended_there(self, message: Ended) -> EndNoted:
        """Another node's report of the end of an actor that is monitored from here."""
        self._down(message.id, message.kind, message.reason)
        return EndNoted()

    async def _report(self, watcher: NodeAddress, message: Ended) -> None:
        try:
            await self._node.ask(Ref(watcher, NODE_ACTOR), message, EndNoted, timeout_s=ANSWER_S, retries=RETRIES)
        except BusError:  # the watcher's node is lost, or will take this one for lost
            self._node.counters["downs_unsent"] += 1

    def _enter(self, actor: str, key: _Key, here: _Here) -> None:
        self._remove(key)  # a number that comes again replaces what it stood for
        self._here.setdefault(actor, {})[key] = here
        self._actor_of[key] = actor

    def _remove(self, key: _Key) -> None:
        actor = self._actor_of.pop(key, None)
        if actor is None:
            return
        here = self._here[actor].pop(key)
        if not self._here[actor]:
            del self._here[actor]
        self._let_go(here)

    def _let_go(self, here: _Here) -> None:
        if here.watcher is not None:
            self._liveness.release(here.watcher)
        if here.link is not None:
            here.link.cancel()

    # ---- ends ----------------------------------------------------------------------------------------------------

    def ended(self, ref: Ref, kind: DownKind, reason: str) -> None:
        """An actor of this node has ended."""
        told = self._here.pop(ref.actor, {})
        for key, here in told.items():
            del self._actor_of[key]
            here.notify(Down(ref, kind, reason))
            self._let_go(here)

    def gone(self, gone: NodeGone) -> None:
        """Nobody there is watched, or watches, any more."""
        kind: DownKind = "node_restarted" if gone.restarted else "node_lost"
        for id_, away in list(self._away.items()):
            node = away.held or away.ref.node
            if node.name == gone.name and 0 < node.epoch <= gone.epoch:
                self._down(id_, kind, gone.why)
        for key in [key for key in self._actor_of if key[0] == gone.name and key[1] <= gone.epoch]:
            self._remove(key)
