"""Orders take effect for whoever is let in, in nobody else's name, and never without a line in the audit log."""

from __future__ import annotations

import getpass
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from actors.core import Node, Ref
from actors.telemetry import SpansTaken
from bus import keyring
from bus.message import NodeAddress, RemoteError
from bus.security import ClusterKey, make_key, read_key
from coordinator.admin import AdminDesk, RunState
from coordinator.coordinator import Coordinator
from coordinator.desk.audit import AuditLine, AuditLog
from coordinator.desk.desk import Desk
from coordinator.desk.messages import DESK
from coordinator.desk.orders import ChangeAlpha, ChangeRedundancy, GiveOrder, PauseJob, ResumeJob
from coordinator.losses import LossWatch
from coordinator.messages import Changed, Join, Welcome
from coordinator.resources.resolve import Placement
from coordinator.scheduling.ledger import Ledger
from coordinator.scheduling.rolling import RollingScheduler, Rules
from coordinator.shell import orders
from coordinator.shell.connection import Connection, ShellError, Target, open_node

ME = f"{getpass.getuser()}@{socket.gethostname()}"


def unexpected(what: BaseException | Join | SpansTaken | str) -> None:
    raise AssertionError(what)


class Place:
    """A coordinator with its desk, and what it decides by."""

    def __init__(self, address: NodeAddress, scheduler: RollingScheduler, audit: AuditLog) -> None:
        self.address = address
        self.scheduler = scheduler
        self._audit = audit

    def connection(self, node: Node) -> Connection:
        return Connection(node, Target("run", self.address.control))

    def lines(self) -> list[AuditLine]:
        return self._audit.newest(100)


@asynccontextmanager
async def place(
    directory: Path, key: ClusterKey | None = None, metrics: tuple[str, int] | None = None
) -> AsyncIterator[Place]:
    rules = Rules(groups_per_step=2, group_size=2, alpha=1, redundant_groups=0, temperature=1.0, seed=0)
    scheduler, state = RollingScheduler(rules, Ledger()), RunState("run", 10)
    coordinator = Coordinator(
        scheduler,
        Welcome("run", b"{}", "", "", "", 0),
        failed=unexpected,
        joined=unexpected,
        spans=unexpected,
        desk=AdminDesk(state, scheduler),
        warn=unexpected,
        losses=LossWatch(10),
        silence_s=10.0,
    )
    audit = AuditLog(directory / "audit.jsonl")
    desk = Desk(
        coordinator,
        scheduler,
        state,
        Placement([]),
        store="embedded",
        shards=[],
        directory=directory,
        key=key,
        listening=print,
        metrics=metrics,
    )
    async with Node("control", key=key) as node:
        await node.spawn(lambda: coordinator, "coordinator", restarts=0)
        await node.spawn(lambda: desk, DESK)
        yield Place(node.address, scheduler, audit)


async def test_an_order_takes_effect_and_is_written_down(tmp_path: Path) -> None:
    async with place(tmp_path) as made, open_node(made.address.control, None) as shell:
        run = made.connection(shell)
        assert await orders.give(run, ChangeAlpha(3)) == Changed("alpha was 1 and is now 3; at most 8 groups run")
        assert await orders.give(run, ChangeRedundancy(2)) == Changed(
            "lambda was 0 and is now 2; at most 10 groups run"
        )
        await orders.give(run, PauseJob())
        await orders.give(run, ResumeJob())
        assert (made.scheduler.rules.alpha, made.scheduler.rules.redundant_groups) == (3, 2)
        found = [(line.by, line.node, line.order, line.before, line.after, line.result) for line in made.lines()]
    name = shell.address.name
    assert found == [
        (ME, name, "set alpha 3", "1", "3", "done"),
        (ME, name, "set lambda 2", "0", "2", "done"),
        (ME, name, "pause", "going on", "paused", "done"),
        (ME, name, "resume", "paused", "going on", "done"),
    ]


async def test_an_order_that_cannot_be_carried_out_is_written_down_as_refused(tmp_path: Path) -> None:
    async with place(tmp_path) as made, open_node(made.address.control, None) as shell:
        with pytest.raises(ShellError, match="alpha: expected 0 or more, found -1"):
            await orders.give(made.connection(shell), ChangeAlpha(-1))
        (line,) = made.lines()
    assert (line.order, line.before, line.after) == ("set alpha -1", "", "")
    assert line.result == "refused: alpha: expected 0 or more, found -1"


async def test_nobody_gives_an_order_in_anothers_name(tmp_path: Path) -> None:
    async with (
        place(tmp_path) as made,
        open_node(made.address.control, None) as honest,
        Node("mallory") as mallory,
    ):
        await orders.give(made.connection(honest), ResumeJob())
        order = GiveOrder(ChangeAlpha(9), Ref(honest.address, orders.SIGNER), "guessed")
        with pytest.raises(RemoteError, match="does not confirm it"):
            await mallory.ask(Ref(made.address, DESK), order, timeout_s=10)
        assert made.scheduler.rules.alpha == 1
        assert made.lines()[-1].result.startswith("refused: set alpha 9: its giver, node admin-")


async def test_an_order_that_cannot_be_written_down_is_not_begun(tmp_path: Path) -> None:
    async with place(tmp_path / "missing") as made, open_node(made.address.control, None) as shell:
        with pytest.raises(ShellError, match="No such file or directory"):
            await orders.give(made.connection(shell), ChangeAlpha(3))
        assert made.scheduler.rules.alpha == 1


async def test_with_keys_the_log_says_whose_key_it_was(tmp_path: Path) -> None:
    cluster = make_key(tmp_path / "cluster.key")
    content, own = keyring.add_node(cluster.content, "ada")
    keyring.replace(tmp_path / "cluster.key", content)
    keyring.create(tmp_path / "ada.key", own)
    keys = read_key(tmp_path / "cluster.key")
    async with (
        place(tmp_path, keys) as made,
        open_node(made.address.control, read_key(tmp_path / "ada.key")) as adas,
        open_node(made.address.control, keys) as anybodys,
    ):
        await orders.give(made.connection(adas), ChangeAlpha(2))
        await orders.give(made.connection(anybodys), ChangeAlpha(1))
        first, second = made.lines()
    assert first.node.startswith("ada.admin-")
    assert first.key == own.pairs[0].public[:12]
    assert second.node.startswith("admin-")
    assert second.key == content.pairs[0].public[:12]
