"""LLMProxy: one gateway to all engines; commands are taken in no time, whatever the engines do.

Invariants:

- every accepted ADD is answered at its ``reply_to``: by an engine's host with ``Finished``, or from here with
  ``RequestFailed`` and a reason, as wrong parameters are. A request whose engine died goes on at another one, behind
  the tokens that are known of it (``actors.proxy.kept``), at most ``MAX_MOVES`` times; what the dead one may still have
  said comes on top of that, so whoever asked takes the first answer to a request id. Only what goes on at another proxy
  (``TrajectoryEnded.moved``) is not answered from here;
- what an engine lets go in the middle (``MoveTrajectories``) goes on elsewhere from the tokens that it has, each with
  its version, on an engine whose version is no older than theirs; where none is left they are dropped, and counted;
- only engines with an accepted receipt serve. A request that arrives while none does waits for one: with an engine
  that is about to come back, else here. Where none is left it waits for whoever asked to ask another proxy.

An engine's life, as the proxy sees it (``version`` is None while it holds no weights that were proven):

    starting --(EngineReady)--> cold --(Update, receipt accepted, Resume)--> serving <--(Suspend, Resume)--> suspended
    any of them --(death)--> dead --(restarted, EngineReady)--> cold; --(no restart left, or Remove)--> removed
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from actors.core import Actor, Ref, handler
from actors.proxy.admission import Admission, groups_within, is_superseded
from actors.proxy.commands import Commands
from actors.proxy.costs import Costs
from actors.proxy.dispatch import Dispatch
from actors.proxy.engines.protocol import FinishReason, nothing_sampled
from actors.proxy.entry import EngineEntry
from actors.proxy.fleet import Fleet
from actors.proxy.kept import Kept, Part, pack, sampled_so_far
from actors.proxy.messages import (
    ADVICE,
    Abort,
    Accepted,
    Acknowledged,
    Add,
    Assign,
    Assigned,
    CostsState,
    DescribeCosts,
    DescribeProxy,
    Done,
    EngineReady,
    Finished,
    HostAbort,
    InheritCosts,
    Inherited,
    KeptSoFar,
    MoveTrajectories,
    Moving,
    Prefer,
    Progress,
    ProxyState,
    Rebalance,
    Rebalanced,
    Remove,
    RequestFailed,
    Resume,
    SampledSoFar,
    Served,
    Suspend,
    TrajectoryEnded,
    UndoMapping,
    Update,
)
from actors.proxy.mover import Mover
from actors.proxy.pool import Pool, by_name
from actors.proxy.prefixes import Prefixes
from actors.proxy.splitting import Splitter
from actors.settings import SplitSettings
from actors.weightsync.messages import EngineJoined, EngineLeft
from hwprobe.cost import ModelSize
from hwprobe.costmodel import CostModel

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_MOVES = 3
REMEMBERED = 10_000
"""Finished requests whose ids are remembered, so that a late copy of an ADD has no effect."""


class NoEngineLeft(RuntimeError):
    """Every engine died or was refused; the message has the last one's words."""


class LLMProxy(Actor):
    """See the module docstring. ``classes`` names the engines and their hardware classes, from the affinity map."""

    fleet: Fleet  # set before the first message

    def __init__(
        self,
        classes: dict[str, str],
        affinity: dict[str, str],
        *,
        failed: Callable[[BaseException], None],
        serves: Callable[[dict[str, int]], object] = lambda places: None,
        costs: CostModel | None = None,
        split: SplitSettings | None = None,
    ) -> None:
        """``serves`` is told how many places the engines that serve have, by class, whenever that changes; ``costs``:
        what is known of the model and the classes before anything is measured; ``split``: which of them prefill."""
        self._costs = Costs(costs or CostModel.prior(ModelSize(), classes.values()), affinity)
        self._pool = Pool(EngineEntry(name, of, self._costs.rates(of).room) for name, of in classes.items())
        self._engines = self._pool.engines
        self._splitter = Splitter(split, self._pool)
        self._admission = Admission()
        self._weightsync: Ref | None = None
        self._failed = failed
        self._serves = serves
        self._serving: dict[str, int] = {}  # as was told last
        self._queued: dict[str, Add] = {}
        self._where: dict[str, str] = {}  # request id -> engine
        self._prefixes = Prefixes()
        self._moves: Counter[str] = Counter()  # by request, away from engines that died
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._tokens = 0
        self._counters: Counter[str] = Counter()
        self._kept = Kept(self._counters)
        self._mover = Mover(self._prefixes, self._where, self._kept, self._counters, self)
        self._dispatch = Dispatch(
            self._pool,
            self._costs,
            self._prefixes,
            self._mover,
            self._splitter,
            counters=self._counters,
            hands=self,
        )
        self._commands = Commands(self._engines, self)

    async def on_stop(self) -> None:
        await self.fleet.stop()

    # ---- requests ------------------------------------------------------------------------------------------------

    @handler
    async def add(self, message: Add) -> Accepted:
        """Route a request, or refuse it. A repeated id is accepted again without effect."""
        id_ = self._admission.first(message.request)
        if id_ in self._where or id_ in self._queued or id_ in self._finished:
            self._counters["repeated_adds"] += 1
            return Accepted(self._where.get(id_, ""))
        if message.domain != ADVICE:
            now, request = asyncio.get_running_loop().time(), message.request
            self._costs.asked(message.domain, request.trajectory, len(request.prompt), now, message.turn)
        return Accepted(max(map(self.route, self._admission.parts(message))))  # the name of one that has some

    def route(self, message: Add) -> str:
        """Give a request to an engine, whose name is returned, or let it wait for one."""
        request = message.request
        refusal = self._admission.refusal(request)
        if refusal:
            self._counters["requests_refused"] += 1
            self.fail(message, f"refused by the proxy: {refusal}")
            return ""
        if is_superseded(request, self._pool):
            self._counters["requests_superseded"] += 1
            self._answer_cut(message, "superseded")
            return ""
        message, engine = self._dispatch.place(message, groups_within(request, self._pool))
        if engine is None:
            self._queued[request.request_id] = message
            return ""
        self._where[request.request_id] = engine.name
        return engine.name

    def _route_queued(self) -> None:
        waiting, self._queued = self._queued, {}
        for message in waiting.values():
            self.route(message)

    @handler(urgent=True)
    async def abort(self, message: Abort) -> Acknowledged:
        """End a request wherever it is, with all of its completions; unknown and finished ones are ignored."""
        for id_ in self._admission.ids(message.request_id):
            queued = self._queued.pop(id_, None)
            if queued is not None:
                self.answer_aborted(queued)
            self._mover.aborted(id_)
            engine = self._engines.get(self._where.get(id_, ""))
            if engine is not None and engine.host is not None:
                self._dispatch.flush()  # the ADD must not arrive after its ABORT
                self.node.tell(engine.host, HostAbort(id_))
        return Acknowledged()

    def answer_aborted(self, add: Add) -> None:
        """One that no engine has."""
        if add.request.begun is None:
            self.fail(add, "aborted")
        else:
            self._answer_cut(add, "aborted")

    def _answer_cut(self, add: Add, reason: FinishReason) -> None:
        """With the tokens that it has."""
        self._costs.unanswered(add.request.trajectory)
        self._forget(add.request.request_id)
        self.node.tell(add.reply_to, Finished("", [nothing_sampled(add.request, reason)]))

    @handler
    async def trajectory_ended(self, message: TrajectoryEnded) -> None:
        self._costs.ended(message.trajectory, whole=message.whole)
        self._mover.ended(message.trajectory)
        for add in [add for add in self._queued.values() if add.request.trajectory == message.trajectory]:
            del self._queued[add.request.request_id]
            if not message.moved:
                self.fail(add, "its trajectory has ended")
        if message.moved:
            self._let_go(message.trajectory)
        holder = self._engines.get(self._prefixes.end(message.trajectory) or "")
        if holder is not None and holder.host is not None and holder.state in ("serving", "suspended"):
            self.tell_forget(holder, message.trajectory)

    def _let_go(self, trajectory: str) -> None:
        """Another proxy answers for it: what an engine here still says of it is taken by who asked, a failure here is
        not to be. Nothing of it is remembered as answered, for it may come back."""
        for engine in self._engines.values():
            for id_ in [id_ for id_, add in engine.in_flight.items() if add.request.trajectory == trajectory]:
                engine.take(id_)
                self._kept.forget(id_)
                self._where.pop(id_, None)
                self._moves.pop(id_, None)
        self._counters["trajectories_let_go"] += 1

    def tell_forget(self, engine: EngineEntry, trajectory: str) -> None:
        """For the mover."""
        self._dispatch.forget(engine, trajectory)

    @handler
    async def rebalance(self, message: Rebalance) -> Rebalanced:
        serving = [engine for engine in self._engines.values() if engine.state == "serving"]
        return Rebalanced(self._mover.release(serving))

    @handler(urgent=True)
    async def move(self, message: MoveTrajectories) -> Moving:
        source, target = by_name(self._engines, message.source), by_name(self._engines, message.target)
        return self._mover.order(source, target, message)

    @handler
    async def served(self, message: Served) -> None:
        self._tokens += message.tokens
        engine, now = self._engines.get(message.engine), asyncio.get_running_loop().time()
        if engine is not None and engine.host is not None:
            if message.load is not None:
                engine.measured, engine.measured_at = message.load, now
                self._splitter.said(engine.name)
                self._counters["engines_hung"] += self.fleet.judge(engine.name, message.effort, len(engine.in_flight))
            if message.work is not None:
                self._costs.worked(engine.hardware_class, message.work)
        sampled = dict(zip(message.request_ids, message.sampled, strict=False))  # which scripted engines leave out
        for id_ in message.request_ids:
            add = None if engine is None else engine.take(id_)
            if engine is None or add is None:
                self._counters["late_answers"] += 1  # it was declared dead, and its requests were moved
                continue
            if sampled.get(id_):
                self._costs.answered(add.request.trajectory, sampled[id_], now)
                self._prefixes.grew(add.request.trajectory, engine, sampled[id_])
            else:
                self._costs.unanswered(add.request.trajectory)
            self._forget(id_)

    @handler
    async def sampled_so_far(self, message: SampledSoFar) -> Acknowledged:
        engine = self._engines.get(message.engine)
        if engine is not None:
            self._relay(message.engine, self._kept.take(message, engine.in_flight), engine.in_flight)
            engine.advanced(sampled_so_far(message, engine.in_flight))
        return Acknowledged()

    def _relay(self, engine: str, parts: Sequence[Part], in_flight: Mapping[str, Add]) -> None:
        """To whoever asked, for the case that this proxy is lost: what was taken alone, in that order."""
        of: dict[Ref, list[Part]] = {}
        for part in parts:
            add = in_flight[part[0]]
            if add.keeps:
                of.setdefault(add.reply_to, []).append(part)
        for asked, own in of.items():
            self.node.tell(asked, KeptSoFar(self.ref, pack(engine, own)))

    def _forget(self, id_: str) -> None:
        """A request has had its answer."""
        self._kept.forget(id_)
        self._where.pop(id_, None)
        self._moves.pop(id_, None)
        self._finished[id_] = None
        if len(self._finished) > REMEMBERED:
            self._finished.popitem(last=False)

    # ---- commands ------------------------------------------------------------------------------------------------

    @handler(urgent=True)
    async def suspend(self, message: Suspend) -> AsyncIterator[Progress]:
        yield Accepted(message.engine or "")
        await self._commands.suspend(message.engine)
        yield Done()

    @handler(urgent=True)
    async def update(self, message: Update) -> AsyncIterator[Progress]:
        yield Accepted(message.engine)
        yield Done(message.version, await self._commands.update(message.engine, message.version))

    @handler(urgent=True)
    async def resume(self, message: Resume) -> AsyncIterator[Progress]:
        yield Accepted(message.engine or "")
        await self._commands.resume(message.engine, message.version)
        self._tell_serving()
        self._route_queued()
        yield Done(message.version)

    def _tell_serving(self) -> None:
        serving = self._pool.serving()
        if serving != self._serving:
            self._serving = serving
            self._serves(serving)

    def ask_host(
        self, engine: EngineEntry, message: msgspec.Struct, reply: type[T], timeout_s: float, *, retries: int = 0
    ) -> Awaitable[T]:
        """For the mover."""
        return self._commands.ask_host(engine, message, reply, timeout_s, retries=retries)

    # ---- engines come and go -------------------------------------------------------------------------------------

    @handler(urgent=True)
    async def engine_ready(self, message: EngineReady) -> Acknowledged:
        engine = by_name(self._engines, message.engine)
        if engine.state == "removed":
            raise ValueError(f"engine {engine.name} was taken out of routing")
        engine.ready(message.host, message.limits)
        self._admission.engine_ready(engine.name, message.limits)
        log.info("engine %s is up after %.1f s", engine.name, message.start_seconds)
        self.fleet.ready(engine.name, message.host.node)
        if self._weightsync is not None:
            self.node.tell(self._weightsync, EngineJoined(engine.name, message.host, self.ref))
        return Acknowledged()

    def introduce(self, weightsync: Ref) -> None:
        """From now on engines that come up are brought to the current version; those that are up already, too."""
        self._weightsync = weightsync
        for engine in self._engines.values():
            if engine.host is not None:
                self.node.tell(weightsync, EngineJoined(engine.name, engine.host, self.ref))

    def engine_died(self, name: str, reason: str, *, restarting: bool, ordered: bool = False) -> None:
        """Called by the fleet: give the engine's requests to others, or keep them until one serves. One that went by
        ``ordered`` removal did not die of its requests."""
        engine = self._engines[name]
        if engine.state == "removed":
            return
        engine.restarts += restarting
        if engine.host is not None:
            self.node.lose(engine.host.node, reason)
        engine.lose("dead" if restarting else "removed")
        self._mover.gone(name)
        self._counters["engine_deaths"] += 1
        self._tell_serving()
        if self._weightsync is not None:
            self.node.tell(self._weightsync, EngineLeft(name, reason))
        self._move_requests(engine, f"engine {name}: {reason}", counted=not ordered)
        if self._pool.none_left:  # what waits is asked of another proxy, or the sitting ends
            self._failed(NoEngineLeft(f"no engine is left; the last, {name}: {reason}"))

    def _move_requests(self, engine: EngineEntry, reason: str, *, counted: bool) -> None:
        """``counted``: among those after which a request is given up."""
        moving = engine.take_all()
        # A trajectory may have several: the engine tells of an answer later than the trajectory's next request comes.
        running = {add.request.trajectory for add in moving.values()} & self._prefixes.holder.keys()
        for trajectory in running:
            if self._prefixes.holder[trajectory] == engine.name:
                self._prefixes.lost(trajectory)
        for id_, add in moving.items():
            del self._where[id_]
            self._moves[id_] += counted
            if add.request.trajectory not in running:
                self.fail(add, f"its trajectory has ended, and {reason}")
            elif self._moves[id_] > MAX_MOVES:
                self.fail(add, reason)
            else:
                self._counters["requests_moved"] += 1
                self.route(self._kept.along(add))

    def fail(self, add: Add, reason: str) -> None:
        self._counters["requests_failed"] += 1
        self._costs.unanswered(add.request.trajectory)
        self._forget(add.request.request_id)
        self.node.tell(add.reply_to, RequestFailed(add.request.request_id, reason))

    @handler(urgent=True, cancellable=False)
    async def remove(self, message: Remove) -> Acknowledged:
        by_name(self._engines, message.engine)  # it is one
        log.error("engine %s is taken out of routing: %s", message.engine, message.reason)
        self.engine_died(message.engine, message.reason, restarting=False, ordered=True)
        await self.fleet.retire(message.engine)
        return Acknowledged()

    @handler(urgent=True)
    async def prefer(self, message: Prefer) -> Acknowledged:
        self._costs.prefer(message.domain, message.hardware_class)
        self._counters["rebindings"] += 1
        return Acknowledged()

    @handler(urgent=True)
    async def assign(self, message: Assign) -> Assigned:
        assigned = self._costs.assign(message, asyncio.get_running_loop().time())
        self._counters["mappings_refused" if assigned.refused else "mappings_ordered"] += 1
        return assigned

    @handler(urgent=True, cancellable=False)
    async def undo_mapping(self, message: UndoMapping) -> Assigned:
        undone = self._costs.undo(asyncio.get_running_loop().time())
        self._counters["mappings_undone"] += 1
        return undone

    @handler(urgent=True)
    async def inherit_costs(self, message: InheritCosts) -> Inherited:
        return Inherited(self._costs.inherit(message.costs, message.age_s, asyncio.get_running_loop().time()))

    @handler(urgent=True)
    async def describe_costs(self, message: DescribeCosts) -> CostsState:
        return self._costs.describe(asyncio.get_running_loop().time())

    @handler(urgent=True)
    async def describe(self, message: DescribeProxy) -> ProxyState:
        now = asyncio.get_running_loop().time()
        held = Counter(self._prefixes.holder.values())
        engines = [
            engine.describe(now, held[engine.name], *self._mover.ago(engine.name)) for engine in self._engines.values()
        ]
        return ProxyState(engines, len(self._queued), self._tokens, dict(+self._counters))
