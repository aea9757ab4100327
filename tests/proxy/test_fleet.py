"""The engine processes: watched, restarted once, then removed. Processes are scripted here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from actors.core import Node
from actors.core.hosting import ChildSpec
from actors.core.restarts import Restarts
from actors.proxy import fleet as fleet_module
from actors.proxy.engines.progress import Effort
from actors.proxy.fleet import RESTARTS, SILENCE_S, EngineFleet
from tests.support.loops import run, until


class Process:
    """Stands for an engine's process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ended = asyncio.Event()
        self.reason = ""
        self.stopping = False
        self.stopped = False

    async def watch(self, on_death: Callable[[str], None]) -> None:
        await self.ended.wait()
        if not self.stopping:
            on_death(self.reason)

    def die(self, reason: str) -> None:
        self.reason = reason
        self.ended.set()

    def kill(self) -> None:
        self.die("killed")

    def terminate(self) -> None:
        self.stopping = True
        self.ended.set()

    async def stop(self) -> None:
        self.terminate()


class Owner:
    def __init__(self) -> None:
        self.deaths: list[tuple[str, str, bool]] = []

    def engine_died(self, name: str, reason: str, *, restarting: bool) -> None:
        self.deaths.append((name, reason, restarting))


class World:
    def __init__(self, node: Node, fleet: EngineFleet, owner: Owner) -> None:
        self.node = node
        self.fleet = fleet
        self.owner = owner
        self.processes: list[Process] = []
        self.cannot_start = ""
        self.hold = asyncio.Event()
        self.hold.set()

    async def start_child(self, name: str, *_: object, **__: object) -> Process:
        await self.hold.wait()
        if self.cannot_start:
            raise OSError(self.cannot_start)
        self.processes.append(Process(name))
        return self.processes[-1]


@asynccontextmanager
async def world(
    path: Path, patch: pytest.MonkeyPatch, restarts: Restarts = RESTARTS, silence_s: float = SILENCE_S
) -> AsyncIterator[World]:
    async with Node("control") as node:
        owner = Owner()
        spec = ChildSpec("e0", "job", node.address, str(path), {})
        made = World(node, EngineFleet(node, {"e0": (spec, {})}, owner, restarts=restarts, silence_s=silence_s), owner)
        patch.setattr(fleet_module, "start_child", made.start_child)
        await made.fleet.start()
        try:
            yield made
        finally:
            await made.fleet.stop()


def test_an_engine_is_restarted_once_and_then_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with world(tmp_path, monkeypatch) as made:
            made.processes[0].die("out of memory")
            await until(lambda: len(made.processes) == 2)
            made.processes[1].die("out of memory again")
            await until(lambda: len(made.owner.deaths) == 2)
            assert made.owner.deaths == [("e0", "out of memory", True), ("e0", "out of memory again", False)]
            await asyncio.sleep(0.01)
            assert len(made.processes) == 2

    run(test())


def test_an_engine_that_is_not_ready_in_time_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "START_TIMEOUT_S", 0.02)

    async def test() -> None:
        async with world(tmp_path, monkeypatch) as made:
            await until(lambda: made.owner.deaths)
            assert made.owner.deaths[0] == ("e0", "not ready within 0.02 s; killed", True)

    run(test())


def test_an_engine_that_stands_still_while_it_starts_is_killed_before_its_time_to_start_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with world(tmp_path, monkeypatch, silence_s=0.02) as made:
            await asyncio.sleep(0.1)
            assert made.owner.deaths == [], "it starts"
            made.processes[0].stopped = True
            await until(lambda: made.owner.deaths)
            assert made.owner.deaths == [("e0", "stopped while it started, for 0.02 s; killed", True)]

    run(test())


def test_an_engine_that_was_ready_in_time_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "START_TIMEOUT_S", 0.02)

    async def test() -> None:
        async with world(tmp_path, monkeypatch) as made:
            made.fleet.ready("e0", made.node.address)
            await asyncio.sleep(0.05)
            assert made.owner.deaths == []

    run(test())


def test_an_engine_that_hangs_is_killed_once_and_restarted_and_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with world(tmp_path, monkeypatch) as made:
            assert not made.fleet.judge("e0", Effort("steps", 89.0), 2)
            assert made.fleet.judge("e0", Effort("steps", 91.0), 2)
            assert not made.fleet.judge("e0", Effort("steps", 92.0), 2), "it is being killed"
            await until(lambda: made.owner.deaths)
            why = "it hangs: no token for 91.0 s, rollout.progress_timeout_s=90; 2 requests wait; killed"
            assert made.owner.deaths == [("e0", why, True)]
            await until(lambda: len(made.processes) == 2)
            made.processes[1].die("out of memory")
            await until(lambda: len(made.owner.deaths) == 2)
            assert made.owner.deaths[1] == ("e0", "out of memory", False)

    run(test())


def test_an_engine_is_restarted_as_often_as_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with world(tmp_path, monkeypatch, Restarts(at_most=2)) as made:
            for life in range(3):
                await until(lambda lives=life + 1: len(made.processes) == lives)  # type: ignore[misc]
                made.processes[life].die("crashed")
            await until(lambda: len(made.owner.deaths) == 3)
            assert [restarting for _, _, restarting in made.owner.deaths] == [True, True, False]

    run(test())


def test_an_engine_that_cannot_be_started_again_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with world(tmp_path, monkeypatch) as made:
            made.cannot_start = "no such file"
            made.processes[0].die("crashed")
            await until(lambda: len(made.owner.deaths) == 2)
            assert made.owner.deaths[1] == ("e0", "could not be started again: no such file", False)

    run(test())


def test_a_retired_engine_is_stopped_and_its_end_reported_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with world(tmp_path, monkeypatch) as made:
            await made.fleet.retire("e0")
            assert made.processes[0].stopping
            await asyncio.sleep(0.01)
            assert made.owner.deaths == []

    run(test())


def test_an_engine_that_is_retired_while_its_successor_starts_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with world(tmp_path, monkeypatch) as made:
            made.hold.clear()
            made.processes[0].die("crashed")
            await until(lambda: made.owner.deaths)
            await made.fleet.retire("e0")
            made.hold.set()
            await until(lambda: len(made.processes) == 2)
            await until(lambda: made.processes[1].stopping)

    run(test())
