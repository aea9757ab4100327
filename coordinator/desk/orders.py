"""What a person may change in a run, and how it is carried out and written down.

Invariant: an order takes effect only after the shell that is named as its giver has said that it gave it, under the
name that its key allows; and whatever came of it is a line in the audit log before it is answered.

The bus lets a node speak under no name but those that its key is good for. That the giver is asked back makes this
hold for the name in the log, too.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import closing
from pathlib import Path

import msgspec

from actors.core import Node, Ref
from actors.core.typed import Message
from actors.proxy.messages import CostsState, DescribeCosts, Rebalance, Rebalanced, UndoMapping
from bus.message import BusError, RemoteError
from bus.security import ClusterKey
from coordinator.admin import RunState
from coordinator.coordinator import Coordinator
from coordinator.desk.audit import AuditLine, AuditLog, key_of, now
from coordinator.handover import Handover
from coordinator.leadership import SOLE
from coordinator.messages import Changed, Pause, ReleaseHost, SetAlpha, Unpause
from coordinator.metadata.protocol import StoreError
from coordinator.orders import AbortTrajectory, DrainHost, FillHost, SetWeights
from coordinator.scheduling.rolling import RollingScheduler
from coordinator.standbylock import anybody_stands
from hwprobe.mapping import describe

log = logging.getLogger(__name__)

CONFIRM_S = 5.0
CARRY_OUT_S = 60.0
ANSWERED_S = 0.5
"""By then an answer has left this process."""


class PauseJob(msgspec.Struct, frozen=True, tag="pause"):
    def __str__(self) -> str:
        return "pause"


class ResumeJob(msgspec.Struct, frozen=True, tag="resume"):
    def __str__(self) -> str:
        return "resume"


class ChangeAlpha(msgspec.Struct, frozen=True, tag="set alpha"):
    alpha: int

    def __str__(self) -> str:
        return f"set alpha {self.alpha}"


class ChangeRedundancy(msgspec.Struct, frozen=True, tag="set lambda"):
    groups: int  # that run beyond the need

    def __str__(self) -> str:
        return f"set lambda {self.groups}"


class ChangeWeights(msgspec.Struct, frozen=True, tag="set weight"):
    weights: dict[str, float]  # by stream of tasks

    def __str__(self) -> str:
        return f"set weight {' '.join(f'{name} {weight:g}' for name, weight in self.weights.items())}"


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    ticket: str

    def __str__(self) -> str:
        return f"abort {self.ticket}"


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    node: str

    def __str__(self) -> str:
        return f"drain {self.node}"


class Fill(msgspec.Struct, frozen=True, tag="fill"):
    node: str

    def __str__(self) -> str:
        return f"fill {self.node}"


class Release(msgspec.Struct, frozen=True, tag="release"):
    host: str

    def __str__(self) -> str:
        return f"release {self.host}"


class RebalanceEngines(msgspec.Struct, frozen=True, tag="rebalance"):
    def __str__(self) -> str:
        return "rebalance"


class UndoLastMapping(msgspec.Struct, frozen=True, tag="undo-mapping"):
    def __str__(self) -> str:
        return "undo-mapping"


class LetNodeGo(msgspec.Struct, frozen=True, tag="let-go"):
    node: str

    def __str__(self) -> str:
        return f"let-go {self.node}"


class StepDown(msgspec.Struct, frozen=True, tag="step-down"):
    def __str__(self) -> str:
        return "step-down"


Order = (
    PauseJob
    | ResumeJob
    | ChangeAlpha
    | ChangeRedundancy
    | ChangeWeights
    | Abort
    | Drain
    | Fill
    | Release
    | LetNodeGo
    | StepDown
    | RebalanceEngines
    | UndoLastMapping
)


class GiveOrder(Message[Changed], frozen=True):
    """To the desk; ``giver`` is asked back with ``ConfirmOrder``."""

    order: Order
    giver: Ref
    nonce: str


class Giver(msgspec.Struct, frozen=True):
    """Who sits at the shell."""

    by: str  # user@host


class ConfirmOrder(Message[Giver], frozen=True):
    """From the desk to the shell: did you give the order of this nonce?"""

    nonce: str


class NotGiven(BusError):
    """Somebody gave an order in another's name, or its giver went away."""


class _Done(msgspec.Struct, frozen=True):
    changed: Changed
    before: str
    after: str


class Orders:
    """See the module docstring."""

    def __init__(
        self,
        node: Node,
        coordinator: Coordinator,
        scheduler: RollingScheduler,
        *,
        state: RunState,
        audit: AuditLog,
        key: ClusterKey | None,
        handover: Handover | None = None,
        directory: Path | None = None,
    ) -> None:
        """``handover``, ``directory``: of a run whose nodes and leader can be replaced."""
        self._handover = handover
        self._directory = directory
        self._node = node
        self._coordinator = coordinator
        self._scheduler = scheduler
        self._run = state
        self._audit = audit
        self._key = key

    async def give(self, message: GiveOrder) -> Changed:
        """Raises what carrying it out raises, ``NotGiven``, ``OSError`` where it cannot be written down."""
        by = ""
        with closing(self._audit.open()) as file:
            try:
                by = await self._confirmed(message)
                done = await self._carry_out(message.order)
            except (BusError, ValueError, StoreError, TimeoutError) as error:
                words = error.remote_message if isinstance(error, RemoteError) else str(error)
                file.write(self._line(message, by, f"refused: {words}"))
                raise
            file.write(self._line(message, by, "done", done.before, done.after))
        log.info("%s ordered %s: %s", by, message.order, done.changed.message)
        return done.changed

    async def _confirmed(self, message: GiveOrder) -> str:
        name = message.giver.node.name
        try:
            giver = await self._node.ask(message.giver, ConfirmOrder(message.nonce), timeout_s=CONFIRM_S, about="order")
        except BusError as error:
            raise NotGiven(f"{message.order}: its giver, node {name}, does not confirm it: {error}") from None
        return giver.by

    def _line(self, message: GiveOrder, by: str, result: str, before: str = "", after: str = "") -> AuditLine:
        node = message.giver.node.name
        return AuditLine(
            time=now(),
            by=by,
            node=node,
            key=key_of(node, self._key),
            order=str(message.order),
            before=before,
            after=after,
            result=result,
        )

    async def _carry_out(self, order: Order) -> _Done:
        before = self._state(order)
        changed = await self._change(order)
        return _Done(changed, before, self._state(order))

    def _state(self, order: Order) -> str:
        """What the order is about, as it is now; "" where that is too much to say."""
        rules, state = self._scheduler.rules, ""
        match order:
            case PauseJob() | ResumeJob():
                state = "going on" if self._run.going.is_set() else "paused"
            case ChangeAlpha():
                state = str(rules.alpha)
            case ChangeRedundancy():
                state = str(rules.redundant_groups)
            case ChangeWeights():
                state = ", ".join(f"{name} {share:.1%}" for name, share in self._scheduler.mix.shares.items())
            case Abort(ticket):
                ledger = self._scheduler.ledger
                state = ledger.entry(ticket).state if ticket in ledger else "not live"
            case Drain(node) | Fill(node):
                hosts = {host.node: host for host in self._coordinator.dispatcher.hosts.states()}
                state = "" if node not in hosts else "draining" if hosts[node].draining else "given tickets"
            case Release(host):
                seconds = self._coordinator.roster.casting.book.barred().get(host)
                state = "not left out" if seconds is None else f"left out for {seconds:.0f} s"
            case LetNodeGo(node):
                state = ", ".join(
                    role for each in self._coordinator.roster.joins if each.node.name == node for role in each.roles
                )
        return state

    async def _change(self, order: Order) -> Changed:
        message: msgspec.Struct
        match order:
            case PauseJob():
                message = Pause()
            case ResumeJob():
                message = Unpause()
            case ChangeAlpha(alpha):
                message = SetAlpha(alpha)
            case ChangeWeights(weights):
                message = SetWeights(weights)
            case Abort(ticket):
                message = AbortTrajectory(ticket)
            case Drain(node):
                message = DrainHost(node)
            case Fill(node):
                message = FillHost(node)
            case Release(host):
                message = ReleaseHost(host)
            case ChangeRedundancy() | RebalanceEngines() | UndoLastMapping() | LetNodeGo() | StepDown():
                return await self._change_here(order)
        return await self._node.ask(self._coordinator.ref, message, Changed, timeout_s=CARRY_OUT_S)

    async def _change_here(
        self, order: ChangeRedundancy | RebalanceEngines | UndoLastMapping | LetNodeGo | StepDown
    ) -> Changed:
        """What is no business of the coordinator's actor."""
        match order:
            case ChangeRedundancy(groups):
                return self._set_redundancy(groups)
            case RebalanceEngines():
                return await self._rebalance()
            case UndoLastMapping():
                return await self._undo_mapping()
            case LetNodeGo(node):
                if self._handover is None:
                    raise ValueError("the nodes of this run cannot be replaced one by one")
                return await self._handover.let_go(node)
            case StepDown():
                return await self._step_down()

    async def _rebalance(self) -> Changed:
        engines = self._coordinator.engines
        if not engines.proxies:
            raise ValueError("rebalance: there is no proxy yet")
        answers = await engines.ask_each(Rebalance(), Rebalanced, timeout_s=CARRY_OUT_S)
        released = ", ".join(f"{name} {count}" for each in answers.values() for name, count in each.released.items())
        if not released:
            return Changed("no engine holds more than its share of trajectories that could be moved now")
        return Changed(f"trajectories that go elsewhere with their next turn: {released}")

    async def _undo_mapping(self) -> Changed:
        engines = self._coordinator.engines
        if not engines.proxies:
            raise ValueError("undo-mapping: there is no proxy yet")
        known = await engines.ask_each(DescribeCosts(), CostsState, timeout_s=CARRY_OUT_S)
        proxies, said = engines.proxies, []
        for name in [name for name, costs in known.items() if costs.orders] or list(known)[:1]:
            undone = await self._node.ask(proxies[name], UndoMapping(), timeout_s=CARRY_OUT_S, about="proxy")
            at = f" at {name}" if len(proxies) > 1 else ""
            holds = describe(undone.shares) or "as declared"
            said.append(f"mapping {undone.number}{at} is taken back; now: {holds}")
        return Changed(f"{'; '.join(said)}, and nothing else changes it for a while")

    async def _step_down(self) -> Changed:
        """Once the answer is on its way."""
        authority, handover = self._coordinator.authority, self._handover
        if authority is SOLE:
            await authority.step_down()
        if handover is not None and handover.under_way:
            raise ValueError(f"{handover.under_way} is being replaced: once the run goes on, again")
        here = self._directory is not None and anybody_stands(self._directory)
        if not here and not await authority.rivals():
            raise ValueError("nobody stands by: first bin/start-coordinator --standby-of RUN, with the new software")
        asyncio.get_running_loop().call_later(ANSWERED_S, lambda: self._node.background(authority.step_down()))
        return Changed("this process leads no longer: a standby leads the run on")

    def _set_redundancy(self, groups: int) -> Changed:
        scheduler = self._scheduler
        before = scheduler.rules.redundant_groups
        scheduler.set_rules(msgspec.structs.replace(scheduler.rules, redundant_groups=groups))
        self._coordinator.flush()
        return Changed(f"lambda was {before} and is now {groups}; at most {scheduler.rules.capacity} groups run")
