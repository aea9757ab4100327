"""A run is found in its directory, also where another process leads it by now; one that is gone is named."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import pytest

from actors.core import Actor, Node, handler
from coordinator.desk.messages import DESK, GetShards, Shards
from coordinator.observe.rundir import Owner
from coordinator.shell.connection import Connection, ShellError, find


class Leader(Actor):
    """A desk that says who it is."""

    def __init__(self, name: str) -> None:
        self._name = name

    @handler
    async def shards(self, message: GetShards) -> Shards:
        return Shards(self._name, [])


def run_directory(base: Path, address: str, pid: int) -> Path:
    run = base / "20260131-142501-lake"
    run.mkdir(exist_ok=True)
    (run / "coordinator.address").write_text(f"{address}\n")
    (run / "owner.lock").write_bytes(msgspec.json.encode(Owner(pid, socket.gethostname(), "now")))
    return run


async def test_the_shell_goes_on_with_whoever_leads_the_run_now(tmp_path: Path) -> None:
    async with Node("shell") as node:
        async with Node("control") as first:
            await first.spawn(lambda: Leader("first"), DESK)
            run = run_directory(tmp_path, first.address.control, os.getpid())
            connection = Connection(node, find(run, None), timeout_s=2.0)
            assert (await connection.ask(GetShards())).store == "first"
        async with Node("control") as second:
            await second.spawn(lambda: Leader("second"), DESK)
            run_directory(tmp_path, second.address.control, os.getpid())
            assert (await connection.ask(GetShards())).store == "second"
        with pytest.raises(ShellError, match="20260131-142501-lake: "):
            await connection.ask(GetShards())


def test_a_run_whose_process_is_gone_is_told_from_one_that_has_ended(tmp_path: Path) -> None:
    gone = 2**22 + 1  # beyond the largest process id of Linux
    run = run_directory(tmp_path, "tcp://127.0.0.1:9", gone)
    with pytest.raises(ShellError, match=f"its process {gone} is gone without a word"):
        find(run, None)
    (run / "coordinator.address").unlink()
    with pytest.raises(ShellError, match="no run is going on there"):
        find(run, None)
    with pytest.raises(ShellError, match="no such run directory"):
        find(tmp_path / "missing", None)
