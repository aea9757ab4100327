"""One process's share of the system: its actors, its connections, and the watch over its peers.

Invariant: whatever runs on a node ends with it, actors newest first, and whoever watches one of them is told.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from actors.core import offers
from actors.core.actor import Actor
from actors.core.builtin import NodeActor
from actors.core.cell import Cell
from actors.core.directory import Directory, DirectoryError
from actors.core.envelope import Envelope
from actors.core.exchange import Exchange
from actors.core.liveness import Liveness
from actors.core.mailbox import MAILBOX_BOUND
from actors.core.metrics import DescribeNode, Description, process_facts
from actors.core.names import Names
from actors.core.objects import Keeper, Objects
from actors.core.offers import Offers, SpawnActor, Spawned
from actors.core.ref import Ref
from actors.core.restarts import NEVER, Restarts
from actors.core.watching import NODE_ACTOR, RETRIES, Down, DownKind, Monitor, NodeGone, Watches
from actors.version import VERSION
from bus.bounds import Bounds
from bus.message import (
    BusError,
    NodeAddress,
)
from bus.objects import ObjectStore
from bus.objects.memory import PrivateMemory
from bus.security import ClusterKey
from bus.transport import Transport
from bus.zeromq import ZeroMQTransport

A = TypeVar("A", bound=Actor)
T = TypeVar("T")
log = logging.getLogger(__name__)

BACKGROUND_END_S = 5.0

WITHDRAW_S = 5.0
"""How long the end of a node, or of an actor with a name, waits for the directory."""


class Node(Exchange, Keeper):
    """Create inside a running event loop; use as ``async with Node("name") as node``."""

    def __init__(
        self,
        name: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        key: ClusterKey | None = None,
        epoch: int | None = None,
        transport: Transport | None = None,
        bounds: Bounds | None = None,
        directory: Directory | None = None,
        objects: ObjectStore | None = None,
        unix: bool = True,
        eager: bool = True,
    ) -> None:
        """``epoch`` grows from one incarnation of a name to the next; the default is the time of day. ``bounds``: of
        what each peer may put on this node. ``directory``: where names are announced and looked up. ``objects``: where
        what is put here goes; by default into memory shared with this machine's processes (none with a ``transport``
        that is given). ``unix``: Unix sockets between it and the nodes of this host.
        ``eager``: look for an answer for up to half a millisecond before going to sleep, where answers come that soon
        (``bus.eager``); not for a process whose other threads compute."""
        epoch = time.time_ns() if epoch is None else epoch
        self._transport = transport or ZeroMQTransport(
            name, epoch, host=host, port=port, key=key, unix=unix, eager=eager
        )
        super().__init__(self._transport, self._gone, bounds)
        self._liveness = Liveness(self._courier, self.background)
        self.watches = Watches(self, self._liveness)
        store = objects or ObjectStore(memory=PrivateMemory() if transport is not None else None)
        self._tidies = transport is None  # in virtual time there are no files of others
        self._objects = Objects(self, store, self._liveness, self._decoder)
        self._names = Names(self, directory)
        self._announced: dict[str, Ref] = {}
        self._offers = Offers(name)
        self._background: set[asyncio.Task[Any]] = set()
        self._on_give_up: Callable[[Ref, BaseException], None] | None = None

    async def __aenter__(self) -> Node:
        """With a directory the node is announced there."""
        if self._tidies:
            self.background(self._objects.store.tidy())
        if self._names.has_directory:
            try:
                await self.announce(f"@{self.address.name}", Ref(self.address, NODE_ACTOR))
            except BaseException:
                await self.close()
                raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # ---- actors --------------------------------------------------------------------------------------------------

    async def spawn(
        self,
        factory: Callable[[], A],
        name: str,
        *,
        bound: int = MAILBOX_BOUND,
        restarts: int | Restarts = 3,
        supervised: bool = False,
    ) -> Ref[A]:
        """Start an actor under a name that is free on this node; returns once its ``on_start`` has run. Raises what
        that raises.

        ``restarts``: after a failure, in place, with the messages that wait: at once and so often in its life, or as
        ``Restarts`` say. ``supervised``: who monitors it deals with its failure for good (``Supervisor`` does), and
        ``on_give_up`` is not called."""
        if self._closed:
            raise BusError(f"node {self.address.name} has closed: cannot spawn {name!r}")
        if name in self._cells:
            raise ValueError(f"node {self.address.name} has an actor {name!r} already")
        if name.startswith("@"):
            raise ValueError(f"an actor {name!r} on node {self.address.name}: names with @ are the node's own")
        limits = restarts if isinstance(restarts, Restarts) else Restarts(at_most=restarts)
        cell = Cell(self, Ref(self.address, name), factory, bound=bound, restarts=limits, supervised=supervised)
        self._cells[name] = cell
        await cell.start()
        return cell.ref

    def _spokesman(self) -> Cell:
        ref = Ref(self.address, NODE_ACTOR)
        cell = Cell(
            self,
            ref,
            lambda: NodeActor(self.watches, self._spawn_offered, self.description, self._objects.lender),
            bound=MAILBOX_BOUND,
            restarts=NEVER,
            supervised=False,
        )
        cell.begin()
        self._cells[NODE_ACTOR] = cell
        return cell

    async def stop(self, ref: Ref) -> None:
        """Stop an actor of this node and wait until it has; one that has stopped already is ignored."""
        if not self.hosts(ref):
            raise ValueError(f"{ref} lives on another node than {self.address.name}: it cannot be stopped from here")
        cell = self._cells.get(ref.actor)
        if cell is not None:
            await cell.stop()

    async def drain(self, ref: Ref, *, within_s: float) -> int:
        """Stop an actor of this node once it has done what it had accepted; new messages are refused at once. Returns
        how many messages were still waiting, or being handled, when the time was up."""
        cell = self._cells.get(ref.actor) if self.hosts(ref) else None
        if cell is None:
            raise ValueError(f"there is no actor {ref} on node {self.address.name} to be drained")
        return await cell.drain(within_s)

    def offer(self, name: str, factory: Callable[..., Actor], settings: type[msgspec.Struct] | None = None) -> None:
        """Let other nodes start actors here (``spawn_on``), made by ``factory()`` or, with a type of settings, by
        ``factory(settings)``."""
        self._offers.add(name, factory, settings)

    async def spawn_on(
        self,
        node: NodeAddress | str,
        offer: str,
        name: str,
        settings: msgspec.Struct | None = None,
        *,
        timeout_s: float,
        bound: int = MAILBOX_BOUND,
        restarts: int | Restarts = 3,
    ) -> Ref:
        """Start what another node (by its name in the directory, or its address) offers there. Once per incarnation of
        that node; raises like ``ask``."""
        until = self.loop.time() + timeout_s
        there = Ref(node, NODE_ACTOR) if isinstance(node, NodeAddress) else await self.find(f"@{node}", timeout_s)
        limits = restarts if isinstance(restarts, Restarts) else Restarts(at_most=restarts)
        order = offers.order(offer, name, settings, bound=bound, restarts=limits)
        left_s = until - self.loop.time()
        return (await self.ask(there, order, Spawned, timeout_s=left_s, retries=RETRIES, about=offer)).ref

    async def _spawn_offered(self, order: SpawnActor) -> Spawned:
        factory = self._offers.factory(order)
        return Spawned(await self.spawn(factory, order.name, bound=order.bound, restarts=order.restarts))

    async def announce(self, name: str, ref: Ref) -> None:
        """Let a name stand for an actor of this node, until it ends. Raises ``DirectoryError``."""
        await self._names.directory.announce(name, ref)
        self._announced[name] = ref

    async def find(self, name: str, timeout_s: float) -> Ref:
        """What a name stands for, once it does. Raises ``DirectoryError``, ``NoSuchActor``. ``Named`` finds its actor
        again after a move, the ref does not."""
        return await self._names.find(name, timeout_s)

    async def _withdraw(self, names: dict[str, Ref]) -> None:
        """Where that cannot be said, who looks will find out."""
        try:
            async with asyncio.timeout(WITHDRAW_S):
                for name, ref in names.items():
                    self._announced.pop(name, None)
                    await self._names.directory.withdraw(name, ref)
        except (DirectoryError, TimeoutError) as error:
            self.counters["withdrawals_failed"] += 1
            log.warning("node %s: %s could not be withdrawn: %s", self.address.name, ", ".join(names), error)

    def ended(self, cell: Cell, kind: DownKind, reason: str) -> None:
        """Called by an actor's cell: its name is free, and whoever watches it is told."""
        if self._cells.get(cell.ref.actor) is cell:
            del self._cells[cell.ref.actor]
        self.watches.ended(cell.ref, kind, reason)
        if announced := {name: ref for name, ref in self._announced.items() if ref == cell.ref}:
            self.background(self._withdraw(announced))

    def end_linked(self, ref: Ref, down: Down) -> None:
        """Called where a linked actor has ended: the other one, of this node, ends too."""
        cell = self._cells.get(ref.actor)
        if cell is not None:
            self.background(cell.stop(linked=f"linked to {down.ref}, of which: {down.reason}"))

    def monitor(self, ref: Ref, notify: Callable[[Down], None]) -> Monitor:
        """Have a function called, once, when an actor ends: for a program that is no actor (``Actor.monitor`` is for
        those). It goes with the node."""
        return self.watches.add(ref, notify)

    def on_give_up(self, callback: Callable[[Ref, BaseException], None]) -> None:
        """What to do when an actor failed more often than it may be restarted (default: log it)."""
        self._on_give_up = callback

    def give_up(self, cell: Cell, error: BaseException) -> None:
        """Called by a cell without a restart left: the actor is stopped and the owner of this node is told."""
        self.counters["actors_given_up"] += 1
        log.error("%s failed too often, last with %r: stopped", cell.ref, error)
        self.background(cell.stop())
        if self._on_give_up is not None and not cell.supervised:
            self.loop.call_soon(self._on_give_up, cell.ref, error)

    def background(self, work: Awaitable[T]) -> asyncio.Task[T]:
        """Run something beside the actors; its failure is logged, never lost."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("background work failed", exc_info=task.exception())

    # ---- peers ---------------------------------------------------------------------------------------------------

    def watch(
        self, peer: NodeAddress, *, silence_s: float, on_lost: Callable[[str], None], least_s: float | None = None
    ) -> None:
        """Ping a peer and, once it has been silent for ``silence_s``, declare it lost and say so. With ``least_s`` one
        that has never been silent for long is missed as soon as that."""
        self._liveness.watch(peer, silence_s=silence_s, on_lost=on_lost, least_s=least_s)

    def is_gone(self, peer: NodeAddress) -> bool:
        """Whether an incarnation is known to have ended: it has closed, was lost, or has a successor."""
        return self._liveness.lost(peer)

    def unwatch(self, name: str) -> None:
        """No longer ping a peer."""
        self._liveness.unwatch(name)

    def _gone(self, name: str, epoch: int, why: str, *, restarted: bool) -> None:
        """The node actor hears of it behind what that node had told it before: how its actors ended."""
        self._objects.gone(name, epoch, why)
        gone = NodeGone(name, epoch, why, restarted)
        cell = self._cells.get(NODE_ACTOR)
        if cell is None:
            self.watches.gone(gone)
        else:
            cell.notice(Envelope(self.facts_for(cell, NodeGone), gone))

    def lose(self, peer: NodeAddress, reason: str) -> None:
        """Declare a peer dead: whatever waits for it fails at once."""
        self._courier.lose(peer, reason)

    def description(self) -> Description:
        """This node and its actors, as they are now."""
        return Description(
            node=self.address.name,
            address=self.address,
            counters=dict(
                self.counters + self._courier.counters + self._transport.counters + self._objects.store.counters
            ),
            unfinished=self._courier.unfinished(),
            watches=len(self.watches),
            actors={name: cell.describe() for name, cell in self._cells.items() if name != NODE_ACTOR},
            dead_letters=self.dead_letters(),
            objects=self._objects.describe(),
            watched=self._liveness.watched(),
            process=process_facts() if self._tidies else None,
            software=VERSION,
        )

    def describe(self) -> dict[str, Any]:
        """``description`` in plain objects, for people and metrics."""
        return {**msgspec.to_builtins(self.description())}

    async def description_of(self, node: NodeAddress | str, *, timeout_s: float) -> Description:
        """Another node's, by its name in the directory or its address. Raises like ``ask``."""
        there = Ref(node, NODE_ACTOR) if isinstance(node, NodeAddress) else await self.find(f"@{node}", timeout_s)
        return await self.ask(there, DescribeNode(), timeout_s=timeout_s)

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Stop all actors, newest first, then the connections. Idempotent. With ``drain_s`` they first do what they
        have accepted, as far as that time goes for all of them."""
        if self._closed:
            return
        self._closed = True
        if self._announced:
            await self._withdraw(dict(self._announced))
        until = self.loop.time() + drain_s
        for cell in reversed(list(self._cells.values()) if drain_s else []):
            await cell.drain(max(until - self.loop.time(), 0.0))
        for cell in reversed(list(self._cells.values())):
            await self.stop(cell.ref)
        await asyncio.sleep(0)  # what tells other nodes of these ends gets on its way
        while tasks := self._background - {asyncio.current_task()}:  # what ends may start something else
            for task in tasks:
                task.cancel()
            _, stuck = await asyncio.wait(tasks, timeout=BACKGROUND_END_S)
            if stuck:
                log.error("node %s: %d background tasks do not end", self.address.name, len(stuck))
                break
        self._names.close()
        await self._objects.close()
        self._courier.close()
