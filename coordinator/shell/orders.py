"""The commands that change something: each gives the desk one order, in the name of the person at the shell."""

from __future__ import annotations

import getpass
import secrets
import socket

from actors.core import Actor, Ref, handler
from coordinator.desk.messages import Audit, GetAudit
from coordinator.desk.orders import (
    Abort,
    ChangeAlpha,
    ChangeRedundancy,
    ChangeWeights,
    ConfirmOrder,
    Drain,
    Fill,
    GiveOrder,
    Giver,
    LetNodeGo,
    Order,
    PauseJob,
    RebalanceEngines,
    Release,
    ResumeJob,
    StepDown,
    UndoLastMapping,
)
from coordinator.messages import Changed, GetStatus, Status
from coordinator.shell.connection import Connection, ShellError

AUDIT_LINES = "20"
SIGNER = "orders"
GIVEN: set[str] = set()
"""Nonces of the orders that this process has given and waits for."""


class Signer(Actor):
    """On the shell's node: says which orders were given here, and by whom."""

    @handler(urgent=True)
    async def confirm(self, message: ConfirmOrder) -> Giver:
        if message.nonce not in GIVEN:
            raise ValueError("no such order was given here")
        return Giver(f"{getpass.getuser()}@{socket.gethostname()}")


async def give(run: Connection, order: Order) -> Changed:
    """Raises ``ShellError``."""
    if not run.node.has(SIGNER):
        await run.node.spawn(Signer, SIGNER)
    nonce = secrets.token_hex(8)
    GIVEN.add(nonce)
    try:
        return await run.ask(GiveOrder(order, Ref(run.node.address, SIGNER), nonce))
    finally:
        GIVEN.discard(nonce)


async def pause(run: Connection) -> Changed:
    return await give(run, PauseJob())


async def resume(run: Connection) -> Changed:
    return await give(run, ResumeJob())


async def set_alpha(run: Connection, number: str) -> Changed:
    return await give(run, ChangeAlpha(int(number)))


async def set_lambda(run: Connection, number: str) -> Changed:
    return await give(run, ChangeRedundancy(int(number)))


async def set_weight(run: Connection, stream: str, weight: str) -> Changed:
    """Raises ``ShellError`` for a weight that is no number."""
    try:
        value = float(weight)
    except ValueError:
        raise ShellError(f"expected: set weight STREAM WEIGHT, with a number of 0 or more; found {weight!r}") from None
    return await give(run, ChangeWeights({stream: value}))


async def abort(run: Connection, ticket: str) -> Changed:
    return await give(run, Abort(ticket))


async def drain(run: Connection, node: str) -> Changed:
    return await give(run, Drain(node))


async def fill(run: Connection, node: str) -> Changed:
    return await give(run, Fill(node))


async def release(run: Connection, host: str) -> Changed:
    return await give(run, Release(host))


async def undo_mapping(run: Connection) -> Changed:
    return await give(run, UndoLastMapping())


async def rebalance(run: Connection) -> Changed:
    return await give(run, RebalanceEngines())


async def let_go(run: Connection, node: str) -> Changed:
    return await give(run, LetNodeGo(node))


async def step_down(run: Connection) -> Changed:
    return await give(run, StepDown())


async def audit(run: Connection, count: str = AUDIT_LINES) -> Audit:
    return await run.ask(GetAudit(int(count)))


# ---- what it may cost -----------------------------------------------------------------------------------------------


async def lower_alpha(run: Connection, number: str) -> str:
    """What a lower alpha does to what is there."""
    now = await run.ask_coordinator(GetStatus(), Status)
    if int(number) >= now.alpha:
        return ""
    return f"alpha is {now.alpha}: trajectories that are older than the new bound are thrown away"
