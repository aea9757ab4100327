"""How a new leader takes over a run that another process led, while the roles live on.

    elected -> node (its epoch is the leader's) -> Follow to every node of the run: from then on they refuse the old one
            -> what runs (env hosts), what is stored and trained on (trainer), what is served (proxy)
            -> the journal, which is nobody else's any more -> scheduler -> leads

Invariant: nothing is read that the old leader could still change: whoever could obey it has heard of the new one first,
and the files of records are the new one's own (``RunDirectory.take_over``).

What the old leader had admitted goes on where it is: tickets that an env host has stay there, stored ones stay stored,
and those that neither has (their order was never sent, or the host is gone) are started again. A step that was under
way is asked for again by the same words, to which the trainer answers with what came of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from actors.core import Node, Ref
from actors.env.messages import GetTickets, TicketsHere
from actors.proxy.messages import DescribeProxy, ProxyState
from actors.trainer.messages import DescribeTrainer, Train, TrainerState, Weights
from bus.message import BusError, NodeAddress
from coordinator.facts import Facts
from coordinator.leadership import Term
from coordinator.messages import MEMBER, ROLES, Announced, Follow, Following, Join, Role, Welcome
from coordinator.metadata.measured import Shard
from coordinator.metadata.protocol import MetadataStore
from coordinator.scheduling.rolling import RollingScheduler, Taken
from coordinator.scheduling.succession import Found, JournalReader

log = logging.getLogger(__name__)

FOLLOW_S = 3.0
"""How long a new leader waits for the last nodes of its run, once every role is there. One that is later than that is
as good as lost: what it ran runs again elsewhere."""
ALL_FOLLOW_S = 20.0
"""How long it waits for every role to be there: less than all would end the run, and nodes may be starved."""
MUSTER_S = 6.0
"""The same where spares could do what is missing: that costs the steps since a checkpoint, not the run."""
FOLLOW_RETRIES = 10
ASK_S = 20.0
BEGUN_S = 60.0
BEGUN_RETRIES = 10


class Followers(msgspec.Struct, frozen=True):
    """The nodes that follow, and the actors of their roles."""

    nodes: list[Following]

    def of(self, role: Role) -> list[Ref]:
        return [each.ref for node in self.nodes for each in node.announced if each.role == role]

    @property
    def spares(self) -> bool:
        """Whether somebody without a role could take what is missing."""
        return any(not node.join.roles for node in self.nodes)

    @property
    def complete(self) -> bool:
        """Whether every role is there; if not, the run has not begun, or cannot go on."""
        return all(self.of(role) for role in ROLES)


class Led:
    """What a leading process has: its session, its term and, where it took over, its node and who follows."""

    def __init__(
        self,
        store: MetadataStore,
        term: Term,
        *,
        shards: list[Shard],
        node: Node | None = None,
        followers: Followers | None = None,
        journal: JournalReader | None = None,
        kept: Followers | None = None,
        told: Sequence[Join] = (),
    ) -> None:
        """``shards``: the store's, whose calls are timed. ``journal``: the old leader's. ``kept``: who takes part as it
        is, where everybody else begins again. ``told``: those, as they are to join."""
        self.journal = journal
        self.kept = kept
        self.told = told
        self.store = store
        self.shards = shards
        self.term = term
        self.node = node
        self.followers = followers


class Legacy(msgspec.Struct, frozen=True):
    """What the parts of a run say of it."""

    trainer: TrainerState
    hosts: dict[str, list[str]]  # names of env hosts' nodes -> the tickets that they have
    served: int  # by every engine that serves; -1 where none does

    @property
    def tickets(self) -> set[str]:
        return {ticket for tickets in self.hosts.values() for ticket in tickets}


class Resumption(msgspec.Struct, frozen=True):
    """What is left for the pipeline to do first."""

    weights: Weights
    order: Train | None  # for the step that is under way, or done without the old leader's knowing
    taken: Taken | None  # its batch
    served: int
    paused: bool  # by a person


async def gather_followers(node: Node, facts: Facts, leader: Ref, *, anew: bool = False) -> Followers:
    """Let every node of the run follow. ``anew``: it begins again, whoever is there. Raises ``StoreError``."""
    addresses = [address for address in await facts.addresses() if address.name != node.address.name]
    asking = [asyncio.ensure_future(_follows(node, address, leader)) for address in addresses]
    began, found = node.loop.time(), Followers([])

    def left_s() -> float:
        most_s = FOLLOW_S if anew or found.complete else MUSTER_S if found.spares else ALL_FOLLOW_S
        return began + most_s - node.loop.time()

    pending: set[asyncio.Future[Following | None]] = set(asking)
    while pending and left_s() > 0:
        done, pending = await asyncio.wait(pending, timeout=left_s(), return_when=asyncio.FIRST_COMPLETED)
        found = Followers([*found.nodes, *(each for task in done if (each := task.result()) is not None)])
    for task in pending:
        task.cancel()
    following = {each.join.node.name for each in found.nodes}
    for address in addresses:
        if address.name not in following:
            log.warning("node %s does not follow", address.name)
            await facts.left(address.name)
    return found


async def _follows(node: Node, address: NodeAddress, leader: Ref) -> Following | None:
    try:
        order = Follow(leader)
        return await node.ask(Ref(address, MEMBER), order, Following, timeout_s=ALL_FOLLOW_S, retries=FOLLOW_RETRIES)
    except BusError as error:
        log.info("node %s: %s", address.name, error)
        return None


async def tell_begun(node: Node, address: NodeAddress, leader: Ref) -> None:
    """Let a node that follows report from now on."""
    order = Follow(leader, begun=True)
    try:
        await node.ask(Ref(address, MEMBER), order, Following, timeout_s=BEGUN_S, retries=BEGUN_RETRIES)
    except BusError as error:  # the watch over the node has the last word
        log.warning("node %s does not know that it is led: %s", address.name, error)


async def gather_legacy(node: Node, followers: Followers) -> Legacy:
    """Raises ``BusError`` where a part of the run does not answer."""
    hosts = followers.of("env")
    here, trainer, proxies = await asyncio.gather(
        asyncio.gather(*(node.ask(host, GetTickets(), TicketsHere, timeout_s=ASK_S) for host in hosts)),
        node.ask(followers.of("trainer")[0], DescribeTrainer(), TrainerState, timeout_s=ASK_S),
        asyncio.gather(
            *(node.ask(proxy, DescribeProxy(), ProxyState, timeout_s=ASK_S) for proxy in followers.of("proxy"))
        ),
    )
    engines = [engine for proxy in proxies for engine in proxy.engines]
    versions = [engine.version for engine in engines if engine.state in ("serving", "suspended")]
    tickets = {host.node.name: [each.id for each in held.tickets] for host, held in zip(hosts, here, strict=True)}
    return Legacy(trainer, tickets, min((-1 if each is None else each for each in versions), default=-1))


def inherit(scheduler: RollingScheduler, found: Found, legacy: Legacy, epoch: int) -> Resumption | None:
    """Bring a fresh scheduler to where the run is. None where the trainer has no weights yet."""
    trainer = legacy.trainer
    if trainer.weights is None:
        return None
    kept = {each.ticket: each for each in trainer.kept}
    last = trainer.last
    order = trainer.stepping
    if last is not None and last.order.version == found.version:  # done, but not in the journal
        order = last.order
        kept |= {each.ticket: each for each in last.kept}
    scheduler.inherit(found, kept, running=legacy.tickets | kept.keys(), epoch=epoch)
    taken = None if order is None else scheduler.retake(order.groups)
    for each in trainer.kept:
        if each.ticket not in legacy.tickets:  # a host that has it will say so itself; else the host is gone
            scheduler.stored(kept[each.ticket])
    return Resumption(trainer.weights, order, taken, legacy.served, found.paused)


class Takeover:
    """Of one run, by one leader; ``resumption`` is None where the run has not begun."""

    def __init__(self, followers: Followers, legacy: Legacy | None, resumption: Resumption | None) -> None:
        self.resumption = resumption
        self._followers = followers
        self._legacy = legacy

    @property
    def joins(self) -> list[Join]:
        """Of those who follow."""
        return [follower.join for follower in self._followers.nodes]

    async def call_together(self, node: Node, leader: Ref, adopt: Callable[[Ref, Sequence[str]], None]) -> None:
        """Those who follow take part, with what they have."""
        for follower in self._followers.nodes:
            await node.ask(leader, follower.join, Welcome, timeout_s=ASK_S)
            for announce in follower.announced:
                await node.ask(leader, announce, Announced, timeout_s=ASK_S)
                if announce.role == "env" and self._legacy is not None:
                    adopt(announce.ref, self._legacy.hosts[announce.ref.node.name])
            node.background(tell_begun(node, follower.join.node, leader))


async def take_over(node: Node, led: Led, scheduler: RollingScheduler, found: Found) -> Takeover:
    """Bring a fresh scheduler to where the run is. Raises ``BusError`` where it cannot be led on."""
    followers = led.followers or Followers([])
    if followers.complete:
        legacy = await gather_legacy(node, followers)
        return Takeover(followers, legacy, inherit(scheduler, found, legacy, led.term.epoch))
    if found.next_ticket:
        gone = ", ".join(role for role in ROLES if not followers.of(role))
        raise BusError(f"the run cannot be led on: {gone} went with its leader; go on from a checkpoint")
    return Takeover(followers, None, None)
