"""The roster of a run: which nodes take part, with which roles, which actor has each role, and who is lost or let go.

    joins --> takes part (watched) --> announces the actors of its roles
                 |-- silent, or its process has ended, or joins anew --> lost: trajectories of an env host run again
                 |                                                       elsewhere, those of a proxy go on at another
                 |                                                       that serves; any other role ends the sitting
                 +-- let go --> its roles are vacant, until another node announces them

Invariants:

- whoever takes part is watched, and who does not any more is not: a node is lost or let go once, and has nothing from
  then on. One whose process is proven to be gone is lost at once, one of which nothing is heard once the watch says so;
- everybody who takes part knows the successor in a vacant role, and a proxy of several, before that one hears that it
  has the role.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import msgspec

from actors.core import Actor, Node, Ref, handler
from actors.env.messages import Noted
from bus.message import BusError
from coordinator.casting import Casting
from coordinator.hostbook import HostBook
from coordinator.job import Job
from coordinator.losses import NodeLost, RoleLost
from coordinator.messages import (
    MEMBER,
    ROLES,
    SEVERAL,
    Announce,
    Changed,
    Ending,
    Find,
    Found,
    GetHosts,
    HardwareChanged,
    HostList,
    Join,
    LetGo,
    Moved,
    Obeyed,
    ReleaseHost,
    Role,
    RoleFailed,
    RunOver,
    StandbyGone,
    Take,
    Welcome,
)
from coordinator.muster import host_of
from coordinator.proxies import ProxyBook
from coordinator.pulse import until_gone
from coordinator.standbys import Standbys
from coordinator.tidings import Tidings

T = TypeVar("T")
log = logging.getLogger(__name__)

JOIN_S = 60.0
"""How long a node that begins again may take to end what it has and to join. It starts its roles after that."""
LET_GO_S = 10.0


class Hands(Protocol):
    """What this needs of the coordinator."""

    node: Node

    async def order(self, to: Ref, message: object, reply: type[T]) -> bool:
        """Whether it has arrived, for sure."""
        ...

    def host_left(self, name: str) -> None:
        """A node plays no more."""


class Patience(msgspec.Struct, frozen=True):
    """How long a node may be silent."""

    silence_s: float
    least_s: float | None = None  # where it has always answered sooner; see actors.core.liveness


class News(msgspec.Struct, frozen=True):
    """Whom the rest of the run hears it from. ``failed`` ends the sitting with a named error."""

    failed: Callable[[BaseException], None]
    joined: Callable[[Join], None]
    left: Callable[[str], None]
    warn: Callable[[str], None]  # a person
    changed: Callable[[Join], None] = lambda join: None  # its hardware


class Roster:
    """See the module docstring. ``welcome`` is what a node hears that joins; create inside a running event loop."""

    def __init__(
        self, hands: Hands, welcome: Welcome, book: HostBook, news: News, patience: Patience, *, epoch: int = 1
    ) -> None:
        loop = asyncio.get_running_loop()
        self.casting = Casting(msgspec.json.decode(welcome.job, type=Job), book)
        self._hands = hands
        self._welcome = welcome
        self._news = news
        self._patience = patience
        self._joins: dict[str, Join] = {}
        self.standbys = Standbys(
            hands,
            self._joins,
            book,
            store=self.casting.job.coordinator.store,
            run_directory=welcome.run_directory,
            warn=news.warn,
        )
        self._roles: dict[Role, asyncio.Future[Ref]] = {role: loop.create_future() for role in ROLES}
        self._vacant: set[Role] = set()  # that somebody had
        self.proxies = ProxyBook(epoch)
        self.tidings = Tidings(hands, lambda: [join.node for join in self._others()])
        self._called_together = True
        self._came: asyncio.Event = asyncio.Event()  # a proxy
        self._followers: defaultdict[Role, list[Callable[[Ref], object]]] = defaultdict(list)

    def close(self, *, dismisses: bool) -> None:
        """Nobody waits for a role any more. ``dismisses``: the others end, too."""
        for future in self._roles.values():
            future.cancel()
        for join in self._others() if dismisses else ():
            self._hands.node.tell(Ref(join.node, MEMBER), RunOver("the run has ended"))

    # ---- who there is --------------------------------------------------------------------------------------------

    @property
    def joins(self) -> list[Join]:
        """Who takes part at the moment."""
        return list(self._joins.values())

    def describe(self) -> HostList:
        """For people: every host that takes part or is left out."""
        return self.casting.describe(self._joins.values(), self.standbys.why_none)

    def _others(self) -> list[Join]:
        here = self._hands.node.address.name
        return [join for name, join in self._joins.items() if name != here]

    def has(self, role: Role) -> Ref | None:
        """The actor that has a role, if anybody has it by now."""
        future = self._roles[role]
        return future.result() if future.done() and not future.cancelled() else None

    async def role(self, role: Role, timeout_s: float) -> Ref:
        """The same, once somebody has it. Raises ``TimeoutError`` naming it."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._roles[role]), timeout_s)
        except TimeoutError:
            raise TimeoutError(f"nobody took the role {role!r} within {timeout_s:g} s") from None

    async def several_proxies(self, count: int, timeout_s: float) -> None:
        """Once there are so many. Raises ``TimeoutError`` saying how many there are."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.proxies.refs) < count:
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            here = len(self.proxies.refs)
            raise TimeoutError(f"rollout.proxies: expected {count} within {timeout_s:g} s, found {here}") from None

    # ---- who comes -----------------------------------------------------------------------------------------------

    def join(self, message: Join) -> Welcome:
        name = message.node.name
        before = self._joins.get(name)
        if before is not None and before.node != message.node:
            self._restarted(before)
        here = name == self._hands.node.address.name
        others = [join for other, join in self._joins.items() if other != name]
        roles = message.roles if here else self.casting.roles_for(message, others)
        taken = self._joins[name] = msgspec.structs.replace(message, roles=roles)
        self._news.joined(taken)
        if not here:
            self._watch(taken)
        self.standbys.see_to_one()
        return msgspec.structs.replace(self._welcome, roles=roles)

    def changed(self, message: HardwareChanged) -> None:
        """A node's hardware is not as it was when it joined, or it is uncertain whether that is known here. Raises
        ``ValueError`` where this node, in this incarnation, does not take part: it must not think that it was heard."""
        name = message.node.name
        before = self._joins.get(name)
        if before is None or before.node != message.node:
            raise ValueError(f"node {name} (epoch {message.node.epoch}) does not take part")
        for line in message.begun:
            self._news.warn(f"{name}: {line}")
        for line in message.ended:
            log.info("node %s: over: %s", name, line)
        if message.affinity != before.affinity:
            self._joins[name] = now = msgspec.structs.replace(before, affinity=message.affinity)
            self._news.changed(now)

    def welcome_at(self, checkpoint: Path, version: int) -> None:
        """A trainer that joins from now on begins there, at the run's version, with what is stored."""
        self._welcome = msgspec.structs.replace(
            self._welcome, resume=str(checkpoint), version=version, keeps_store=True
        )

    async def announce(self, message: Announce) -> None:
        """An actor has a role: who waits for it has it, and where it was vacant all others are told first. So they are
        of every proxy, and of what it serves. Raises ``ValueError`` for a proxy that was lost, or let go."""
        is_known = message.role == "proxy" and self.proxies.has(message.ref)
        if message.role == "proxy":
            self._check_takes_part(message.ref)
            if self.proxies.announce(message.ref, message.serving):
                self._came.set()
                await self._tell_of_proxies()
        if message.role in self._vacant:
            if message.role != "proxy":
                await self.tidings.tell(Moved(message.role, message.ref))
            self._vacant.discard(message.role)
            for follow in self._followers[message.role]:
                follow(message.ref)
        address = message.ref.node
        if not is_known:
            self.casting.book.up(host_of(address), address.name, message.role)
        future = self._roles[message.role]
        if not future.done():
            future.set_result(message.ref)

    def _check_takes_part(self, ref: Ref) -> None:
        join = self._joins.get(ref.node.name)
        if join is None or join.node != ref.node:
            raise ValueError(
                f"node {ref.node.name} takes no part in the run any more: nobody is to ask its {ref.actor}"
            )

    def on_moved(self, role: Role, follow: Callable[[Ref], object]) -> None:
        """``follow`` is told, in this process, whenever another actor has a role."""
        self._followers[role].append(follow)

    @contextmanager
    def calling_together(self) -> Iterator[None]:
        """Within it nobody is told of proxies: those who follow a new leader say one after the other what they have."""
        self._called_together = False
        try:
            yield
        finally:
            self._called_together = True
        self._hands.node.background(self._tell_of_proxies())

    async def _tell_of_proxies(self) -> None:
        """Which ones there are now; not where there is none, as they are then to wait for the next one."""
        found = self.proxies.found
        if found.members and self._called_together:
            await self.tidings.tell(Moved("proxy", found.members[0].ref, found))

    async def miss_who_does_not_join(self) -> None:
        """Of those who were told to begin again: who is not here in time is lost, though nobody could watch it."""
        await asyncio.sleep(JOIN_S)
        held = {role for join in self._joins.values() for role in join.roles}
        for join in self.casting.missed():
            why = f"it was told to begin again and has not joined within {JOIN_S:g} s"
            log.error("node %s (%s) is lost: %s", join.node.name, ", ".join(join.roles), why)
            self._fell("lost", join, why)
            missing = [role for role in join.roles if role not in held]
            if missing:
                self._end_for(join, why, role=missing[0])

    # ---- who goes ------------------------------------------------------------------------------------------------

    def _watch(self, join: Join) -> None:
        name, node = join.node.name, self._hands.node

        def lost(why: str) -> None:
            if self._joins.get(name) is not None and self._joins[name].node == join.node:
                self._lost(name, why)

        patience = self._patience
        node.watch(join.node, silence_s=patience.silence_s, least_s=patience.least_s, on_lost=lost)
        if join.pulse:
            node.background(self._until_gone(join, lost))

    async def _until_gone(self, join: Join, lost: Callable[[str], None]) -> None:
        """Tell once it is proven that a node's process is no more."""
        await until_gone(join.pulse)
        why, now = "its process has ended", self._joins.get(join.node.name)
        if now is not None and now.node == join.node:  # not one that has joined since by that name
            self._hands.node.unwatch(join.node.name)
        self._hands.node.lose(join.node, why)
        lost(why)

    def _lost(self, name: str, why: str) -> None:
        join = self._joins.pop(name)
        self._news.left(name)
        self.standbys.see_to_one()
        self._fell("lost", join, why)
        if not join.roles:
            log.error("spare %s is lost: %s", name, why)
        elif self._goes_on_without(join):
            log.error("node %s (%s): %s; what ran there goes on elsewhere", name, ", ".join(join.roles), why)
            self._replace(join)
            self._leaves(join)
        else:
            self._end_for(join, why)

    def _goes_on_without(self, join: Join) -> bool:
        """Whether others can do what a node did that is gone: env hosts are interchangeable, be it with a spare, and so
        are proxies with those that serve already."""
        name = join.node.name
        if not join.roles or not SEVERAL.issuperset(join.roles):
            return False
        if "proxy" in join.roles and not self.proxies.serve_without(name):
            return False
        if "env" not in join.roles or any("env" in each.roles for other, each in self._joins.items() if other != name):
            return True
        return self.casting.has_spare(self._joins.values())

    def _replace(self, join: Join) -> None:
        """A spare, where there is one, takes the roles of a node that is gone."""
        spare = self.casting.spare_for(join.roles, self._joins.values())
        if spare is not None:
            self._joins[spare.node.name] = taking = msgspec.structs.replace(spare, roles=list(join.roles))
            self._news.joined(taking)
            self._hands.node.background(self._hands.order(Ref(spare.node, MEMBER), Take(list(join.roles)), Obeyed))

    def _leaves(self, join: Join) -> None:
        """The others go on without it. Should it live all the same, it misses its leader, and ends."""
        name, node = join.node.name, self._hands.node
        if "env" in join.roles:
            self._hands.host_left(name)
        if "proxy" in join.roles:
            self._proxy_leaves(name)
            node.background(self._tell_of_proxies())

    def _proxy_leaves(self, name: str) -> None:
        """Of several: another one stands for the role."""
        self.proxies.leave(name)
        self._roles["proxy"] = asyncio.get_running_loop().create_future()
        if self.proxies.refs:
            self._roles["proxy"].set_result(self.proxies.refs[0])

    def _restarted(self, before: Join) -> None:
        """It joins again before anybody has missed it: what ran there is gone. Only env hosts can be had back, and
        proxies of several."""
        name, roles = before.node.name, ", ".join(before.roles)
        self._fell("lost", before, "it has restarted")
        if before.roles == ["env"] or self._goes_on_without(before):
            log.error("node %s (%s) has restarted; what ran there goes on elsewhere", name, roles)
            self._leaves(before)
        elif before.roles:
            text = f"node {name} ({roles}) has restarted: what its roles held is lost"
            self._news.failed(NodeLost(before.roles[0], name, text))

    async def dismiss(self, join: Join) -> None:
        """A node ends while the run goes on: its roles are vacant from now on. Raises ``BusError`` where it does not
        listen; it is lost then."""
        name, node, of_several = join.node.name, self._hands.node, self.one_of_several(join)
        self._joins.pop(name, None)  # first: from here on nobody misses it, and it has nothing
        node.unwatch(name)
        self._news.left(name)
        self.standbys.see_to_one()  # it may have had the standby coordinator
        for role in join.roles:
            if role == "env":
                self._hands.host_left(name)
            elif role == "proxy" and of_several:
                self._proxy_leaves(name)
                await self._tell_of_proxies()
            else:
                if role == "proxy":
                    self.proxies.leave(name)
                self._roles[role] = asyncio.get_running_loop().create_future()
                self._vacant.add(role)
        order, why = LetGo("let go: another node takes its place"), "it does not hear that it is let go"
        try:
            await node.ask(Ref(join.node, MEMBER), order, Ending, timeout_s=LET_GO_S, retries=3)
        except BusError as error:
            self._fell("lost", join, f"{why}: {error}")
            node.lose(join.node, why)
            raise

    def one_of_several(self, join: Join) -> bool:
        """Whether the run goes on without a node that is let go, and waits for nobody in its place."""
        return join.roles == ["env"] or (join.roles == ["proxy"] and self.proxies.serve_without(join.node.name))

    def failed(self, message: RoleFailed) -> None:
        """A role cannot go on, on a node that lives. A proxy without engines is as good as lost, where others serve."""
        join = self._joins.get(message.node)
        if join is not None:
            self._fell("failed", join, message.reason)
        if join is not None and join.roles == ["proxy"] and self._goes_on_without(join):
            log.error("node %s (proxy): %s; what ran there goes on elsewhere", message.node, message.reason)
            del self._joins[message.node]
            self._hands.node.unwatch(message.node)
            self._news.left(message.node)
            self._replace(join)
            self._leaves(join)
            self._hands.node.tell(Ref(join.node, MEMBER), LetGo(f"lost to the run: {message.reason}"))
            self.standbys.see_to_one()
            return
        self._news.failed(RoleLost(message.role, message.node, message.reason))

    def _end_for(self, join: Join, why: str, role: Role | None = None) -> None:
        """The sitting ends for a node that is lost."""
        name, roles = join.node.name, ", ".join(join.roles)
        self._news.failed(NodeLost(role or join.roles[0], name, f"node {name} ({roles}) is lost: {why}"))

    def _fell(self, how: Literal["lost", "failed"], join: Join, reason: str) -> None:
        self.casting.book.fell(how, host_of(join.node), join.node.name, join.roles, reason)


class RosterHandlers(Actor):
    """The coordinator's handlers for it."""

    roster: Roster

    @handler
    async def join(self, message: Join) -> Welcome:
        return self.roster.join(message)

    @handler(concurrent=True)
    async def find(self, message: Find) -> Found:
        ref = await self.roster.role(message.role, message.timeout_s)
        return Found(ref, self.roster.proxies.found if message.role == "proxy" else None)

    @handler
    async def hardware_changed(self, message: HardwareChanged) -> Noted:
        """Raises ``ValueError``."""
        self.roster.changed(message)
        return Noted()

    @handler
    async def role_failed(self, message: RoleFailed) -> None:
        self.roster.failed(message)

    @handler
    async def standby_gone(self, message: StandbyGone) -> Noted:
        self.roster.standbys.lost(message.node, message.reason)
        return Noted()

    @handler
    async def hosts(self, message: GetHosts) -> HostList:
        return self.roster.describe()

    @handler
    async def release_host(self, message: ReleaseHost) -> Changed:
        """Raises ``ValueError``."""
        return self.roster.casting.release(message.host)
