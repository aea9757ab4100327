"""What a person may change in a run, and how it is carried out and written down.

Invariant: an order takes effect only after the shell that is named as its giver has said that it gave it, under the
name that its key allows; and whatever came of it is a line in the audit log before it is answered.

The bus lets a node speak under no name but those that its key is good for. That the giver is asked back makes this
hold for the name in the log, too.
"""

from __future__ import annotations

import logging
from contextlib import closing

import msgspec

from actors.core import Node, Ref
from actors.core.typed import Message
from bus.message import BusError, RemoteError
from bus.security import ClusterKey
from coordinator.admin import RunState
from coordinator.coordinator import Coordinator
from coordinator.desk.audit import AuditLine, AuditLog, key_of, now
from coordinator.messages import Changed, Pause, SetAlpha, Unpause
from coordinator.scheduling.rolling import RollingScheduler

log = logging.getLogger(__name__)

CONFIRM_S = 5.0
CARRY_OUT_S = 60.0


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


Order = PauseJob | ResumeJob | ChangeAlpha | ChangeRedundancy


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


class NotGiven(ValueError):
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
    ) -> None:
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
            except (BusError, ValueError) as error:
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
        """What the order is about, as it is now."""
        rules = self._scheduler.rules
        match order:
            case PauseJob() | ResumeJob():
                return "going on" if self._run.going.is_set() else "paused"
            case ChangeAlpha():
                return str(rules.alpha)
            case ChangeRedundancy():
                return str(rules.redundant_groups)

    async def _change(self, order: Order) -> Changed:
        match order:
            case PauseJob():
                return await self._forward(Pause())
            case ResumeJob():
                return await self._forward(Unpause())
            case ChangeAlpha(alpha):
                return await self._forward(SetAlpha(alpha))
            case ChangeRedundancy(groups):
                return self._set_redundancy(groups)

    async def _forward(self, message: msgspec.Struct) -> Changed:
        return await self._node.ask(self._coordinator.ref, message, Changed, timeout_s=CARRY_OUT_S)

    def _set_redundancy(self, groups: int) -> Changed:
        scheduler = self._scheduler
        before = scheduler.rules.redundant_groups
        scheduler.set_rules(msgspec.structs.replace(scheduler.rules, redundant_groups=groups))
        self._coordinator.flush()
        return Changed(f"lambda was {before} and is now {groups}; at most {scheduler.rules.capacity} groups run")
