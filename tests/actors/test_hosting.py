"""Nodes in processes of their own: messages between them, and how they end."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import bus.asking
from actors.core import Node, Ref
from actors.core.hosting import EXIT_WORK_FAILED, ChildSpec
from actors.core.process import Child, start_child
from bus.message import DecodeError, Lane, PeerLost, PeerRestarted
from bus.security import make_key
from tests.actors.children import Hang, Pid, WhichPid
from tests.actors.support import Add, Array, Count, Sum, Total, alive, until
from tests.actors.test_processes import MODULE, child, end_of


class Hosted:
    """A child process that hosts, as its parent sees it."""

    def __init__(self, node: Node, process: Child, file: Path) -> None:
        self.node = node
        self.process = process
        self._file = file

    async def ref(self) -> Ref:
        await until(self._file.exists)
        return msgspec.json.decode(self._file.read_bytes(), type=Ref)

    async def add(self, ref: Ref, amount: int, **options: Any) -> int:
        options.setdefault("timeout_s", 10)
        return (await self.node.ask(ref, Add(amount), Total, **options)).value


@asynccontextmanager
async def hosted(tmp_path: Path, how: str = "serve", **options: Any) -> AsyncIterator[Hosted]:
    """A parent's node and a child that runs ``tests.actors.children.work``."""
    file = tmp_path / "ref"
    async with Node("parent", **options) as node:
        spec = ChildSpec(
            name="child",
            job="test",
            parent=node.address,
            log_directory=str(tmp_path / "logs"),
            settings={"how": how, "file": str(file)},
            key_file=str(tmp_path / "key") if "key" in options else None,
        )
        async with child(tmp_path, msgspec.json.encode(spec).decode()) as process:
            yield Hosted(node, process, file)


# ---- messages between processes --------------------------------------------------------------------------------------


async def test_asks_streams_and_arrays_travel_between_processes(tmp_path: Path) -> None:
    async with hosted(tmp_path) as host:
        ref = await host.ref()
        assert (await host.node.ask(ref, WhichPid(), Pid, timeout_s=10)).value == host.process.pid
        assert await asyncio.gather(*(host.add(ref, 1) for _ in range(50))) == list(range(1, 51))
        stream = host.node.stream(ref, Count(100), Total, timeout_s=10, lane=Lane.BULK)
        assert [item.value async for item in stream] == list(range(100))
        data = np.random.default_rng(0).integers(0, 2**15, 500_000, np.uint16)
        answer = await host.node.ask(ref, Array(data), Array, timeout_s=10, lane=Lane.BULK)
        np.testing.assert_array_equal(answer.data, data * 2)
        with pytest.raises(DecodeError, match="answered with Total, expected Sum"):
            await host.node.ask(ref, Add(0), Sum, timeout_s=10)


async def test_processes_talk_under_a_cluster_key(tmp_path: Path) -> None:
    async with hosted(tmp_path, key=make_key(tmp_path / "key")) as host:
        assert await host.add(await host.ref(), 1) == 1


async def test_whatever_waits_for_a_process_fails_when_its_death_is_reported(tmp_path: Path) -> None:
    async with hosted(tmp_path) as host:
        ref = await host.ref()
        host.node.background(host.process.watch(lambda reason: host.node.lose(ref.node, reason)))
        host.node.tell(ref, Hang())
        waiting = asyncio.create_task(host.add(ref, 1, timeout_s=60))
        await asyncio.sleep(0.05)
        host.process.kill()
        with pytest.raises(PeerLost, match=r"Add to worker@child: node child is lost: process child \(pid \d+\) ended"):
            await waiting


async def test_a_process_that_comes_back_is_another_incarnation(tmp_path: Path) -> None:
    async with hosted(tmp_path) as host:
        first = await host.ref()
        assert await host.add(first, 1) == 1
        host.process.kill()
        await end_of(host.process)
        (tmp_path / "ref").unlink()
        spec = ChildSpec("child", "test", host.node.address, str(tmp_path), {"file": str(tmp_path / "ref")})
        text = msgspec.json.encode(spec).decode()
        again = await start_child("child", MODULE, [text], log_path=tmp_path / "again.out")
        try:
            second = await host.ref()
            assert await host.add(second, 1) == 1
            with pytest.raises(PeerRestarted, match="node child restarted since it was addressed"):
                await host.add(first, 1)
        finally:
            await again.stop()


@pytest.mark.deep
async def test_asks_with_retries_take_effect_once_through_many_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each incarnation counts exactly the asks that it answered or was killed over."""
    monkeypatch.setattr(bus.asking, "RESEND_AFTER_S", 0.01)
    async with Node("parent") as node:
        for number in range(20):
            file = tmp_path / f"ref-{number}"
            spec = ChildSpec("child", "test", node.address, str(tmp_path), {"file": str(file)})
            text = msgspec.json.encode(spec).decode()
            process = await start_child("child", MODULE, [text], log_path=tmp_path / "child.out")
            host = Hosted(node, process, file)
            ref = await host.ref()
            totals = [await host.add(ref, 1, retries=50) for _ in range(500)]
            assert totals == list(range(1, 501))
            process.kill()
            await end_of(process)
            node.lose(ref.node, "killed")


# ---- ends ------------------------------------------------------------------------------------------------------------


def log_lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in (tmp_path / "logs" / "child.log").read_bytes().splitlines()]


async def status_of(process: Child) -> int:
    async with asyncio.timeout(20):
        return await process._process.wait()


async def test_a_child_that_is_asked_to_stop_finishes_and_says_why(tmp_path: Path) -> None:
    async with hosted(tmp_path) as host:
        await host.ref()
        await host.process.stop()
        assert await status_of(host.process) == 0
    assert log_lines(tmp_path)[-1]["message"] == "ending: asked to stop"
    assert "finished" in (tmp_path / "logs" / "child.out").read_text()


async def test_a_child_that_is_asked_to_stop_while_it_starts_does_so(tmp_path: Path) -> None:
    async with hosted(tmp_path, "start for ever") as host:
        await until((tmp_path / "ref").exists)
        os.kill(host.process.pid, signal.SIGTERM)
        assert await status_of(host.process) == 0
    assert log_lines(tmp_path)[-1]["message"] == "ending: asked to stop"


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("fail to start", "ValueError: no such thing"),
        ("fail later", "RuntimeError: the device is gone"),
        ("fail with a hung thread", "RuntimeError: stuck"),
    ],
)
async def test_a_child_whose_work_fails_ends_with_the_reason_as_its_last_words(
    tmp_path: Path, how: str, why: str
) -> None:
    async with hosted(tmp_path, how) as host:
        reason = await end_of(host.process)
    assert f"exit status {EXIT_WORK_FAILED}" in reason
    assert reason.endswith(f"ending: {why}")
    assert log_lines(tmp_path)[-1]["message"] == f"ending: {why}"


async def test_ctrl_c_is_the_parents_business(tmp_path: Path) -> None:
    async with hosted(tmp_path) as host:
        ref = await host.ref()
        os.kill(host.process.pid, signal.SIGINT)
        assert await host.add(ref, 1) == 1
        assert alive(host.process.pid)
