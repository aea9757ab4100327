"""The trainer actor over scripted ranks: one step at a time, and never a hang when a rank dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.core import Actor, Node, Ref, handler
from actors.core.hosting import ChildSpec
from actors.settings import TrainSettings
from actors.trainer import trainer as trainer_module
from actors.trainer.batches import BatchFiles
from actors.trainer.dump import FORMAT, DumpFacts, read_dump
from actors.trainer.dump import Manifest as DumpManifest
from actors.trainer.messages import (
    DescribeTrainer,
    Discard,
    GetWeights,
    RankReady,
    RankSaved,
    RunStep,
    SaveCheckpoint,
    Saved,
    SaveRank,
    StepResult,
    Store,
    Stored,
    Train,
    Trained,
    TrainerState,
    Weights,
    Welcomed,
)
from actors.trainer.store import TrajectoryStore, read_records
from actors.trainer.trainer import BUFFER_FILE, Trainer, TrainerDied
from actors.weightsync.manifest import Manifest
from bus.message import PeerLost, RemoteError
from tests.support.loops import run, until
from tests.trainer_actor.support import trajectory

MANIFEST = Manifest(0, "float32", {}, np.zeros(2, np.int32), np.zeros(1, np.float32))


class FakeChild:
    """Stands for a rank's process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.watchers: list[Callable[[str], None]] = []
        self.stopped = False

    async def watch(self, on_death: Callable[[str], None]) -> None:
        self.watchers.append(on_death)

    def died(self, reason: str) -> None:
        (watcher,) = self.watchers
        watcher(reason)

    def kill(self) -> None:
        self.died(f"process {self.name} was killed")

    def terminate(self) -> None:
        self.stopped = True

    async def stop(self) -> None:
        self.stopped = True


class ScriptedRank(Actor):
    """Does what it is told, in the order in which it is told; ``gate`` holds it up."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.refuses = False

    @handler
    async def step(self, message: RunStep) -> StepResult:
        self.calls.append(f"step {message.version}")
        await self.gate.wait()
        if self.refuses:
            raise FloatingPointError("t1: the loss is NaN")
        manifest = msgspec.structs.replace(MANIFEST, version=message.version)
        weights = Weights(manifest, self.ref) if self.rank == 0 else None
        return StepResult({"learning_rate_seen": message.learning_rate}, weights)

    @handler
    async def save(self, message: SaveRank) -> RankSaved:
        self.calls.append("save")
        return RankSaved(0.0)


class World:
    """A trainer actor and its ranks, each rank on a node of its own."""

    def __init__(self, node: Node, path: Path, ranks: int, settings: TrainSettings, batches: BatchFiles | None) -> None:
        self.node = node
        self.children: list[FakeChild] = []
        self.ranks = [ScriptedRank(rank) for rank in range(ranks)]
        self.nodes: list[Node] = []
        self.gave_up: list[BaseException] = []
        self.path = path
        self.store = TrajectoryStore(path / "log")
        specs = [ChildSpec(f"trainer-{rank}", "job", node.address, str(path), {}) for rank in range(ranks)]
        devices = [{"CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(ranks)]
        self.environments: dict[str, object] = {}
        self.trainer = Trainer(settings, self.store, specs, devices, self.gave_up.append, batches=batches)

    async def start_child(self, name: str, *_: object, **settings: object) -> FakeChild:
        self.environments[name] = settings["environment"]
        self.children.append(FakeChild(name))
        return self.children[-1]

    async def report(self, rank: int) -> None:
        """A rank comes up."""
        node = Node(f"trainer-{rank}")
        self.nodes.append(node)
        ref = await node.spawn(lambda: self.ranks[rank], "rank")
        weights = Weights(MANIFEST, ref) if rank == 0 else None
        await node.ask(self.trainer.ref, RankReady(rank, ref, weights), Welcomed, timeout_s=5)

    async def ask(self, message: Any, reply: type[Any]) -> Any:
        return await self.node.ask(self.trainer.ref, message, reply, timeout_s=15)

    async def put(self, *tickets: str) -> None:
        for ticket in tickets:
            await self.ask(Store(trajectory(ticket)), Stored)


@asynccontextmanager
async def world(
    path: Path,
    patch: pytest.MonkeyPatch,
    *,
    ranks: int = 1,
    ready: bool = True,
    settings: TrainSettings | None = None,
    batches: BatchFiles | None = None,
) -> AsyncIterator[World]:
    async with Node("control") as node:
        made = World(node, path, ranks, settings or TrainSettings(), batches)
        patch.setattr(trainer_module, "start_child", made.start_child)
        await node.spawn(lambda: made.trainer, "trainer", restarts=0)
        if ready:
            for rank in range(ranks):
                await made.report(rank)
        try:
            yield made
        finally:
            for one in made.ranks:
                one.gate.set()
            for peer in made.nodes:
                await peer.close()


def test_a_step_goes_to_every_rank_and_frees_what_it_was_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with world(tmp_path, monkeypatch, ranks=2) as made:
            await made.put("t1", "t2", "t3")
            trained: Trained = await made.ask(Train(4, [["t1", "t2"]]), Trained)
            assert [one.calls for one in made.ranks] == [["step 5"], ["step 5"]]
            assert trained.weights.source == made.ranks[0].ref
            assert [held.ticket for held in made.store.held()] == ["t3"]

    run(test())


def test_each_rank_has_the_environment_of_its_own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with world(tmp_path, monkeypatch, ranks=2) as made:
            assert made.environments == {
                "trainer-0": {"CUDA_VISIBLE_DEVICES": "0"},
                "trainer-1": {"CUDA_VISIBLE_DEVICES": "1"},
            }

    run(test())


def test_the_learning_rate_warms_up_linearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> list[float]:
        rates = []
        async with world(tmp_path, monkeypatch, settings=TrainSettings(learning_rate=0.8, warmup_steps=4)) as made:
            for version in range(6):
                await made.put("a", "b")
                trained: Trained = await made.ask(Train(version, [["a", "b"]]), Trained)
                assert trained.statistics["learning_rate_seen"] == trained.statistics["learning_rate"]
                rates.append(trained.statistics["learning_rate"])
        return rates

    assert run(test()) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_a_checkpoint_waits_for_the_step_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with world(tmp_path, monkeypatch, ranks=2) as made:
            await made.put("a", "b", "c")
            made.ranks[1].gate.clear()  # the slower one
            step = asyncio.create_task(made.ask(Train(0, [["a", "b"]]), Trained))
            await until(lambda: all(one.calls for one in made.ranks))
            save = asyncio.create_task(made.ask(SaveCheckpoint(str(tmp_path)), Saved))
            await asyncio.sleep(0.05)
            assert [one.calls for one in made.ranks] == [["step 1"], ["step 1"]]
            made.ranks[1].gate.set()
            await asyncio.gather(step, save)
            assert [one.calls for one in made.ranks] == [["step 1", "save"], ["step 1", "save"]]
            assert [held.ticket for held, _ in read_records(tmp_path / BUFFER_FILE)] == ["c"]

    run(test())


def test_a_step_that_a_backend_refuses_keeps_its_trajectories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with world(tmp_path, monkeypatch) as made:
            await made.put("t1", "t2")
            made.ranks[0].refuses = True
            with pytest.raises(RemoteError, match="t1: the loss is NaN"):
                await made.ask(Train(0, [["t1", "t2"]]), Trained)
            made.ranks[0].refuses = False
            await made.ask(Train(0, [["t1", "t2"]]), Trained)

    run(test())


def test_an_order_for_a_step_that_is_given_again_is_carried_out_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with world(tmp_path, monkeypatch) as made:
            await made.put("t1", "t2", "t3")
            made.ranks[0].gate.clear()
            order = Train(0, [["t1", "t2"]])
            first = asyncio.create_task(made.ask(order, Trained))
            await until(lambda: made.ranks[0].calls)
            state: TrainerState = await made.ask(DescribeTrainer(), TrainerState)
            assert state.stepping == order
            assert state.last is None
            assert [kept.ticket for kept in state.kept] == ["t1", "t2", "t3"]
            again = asyncio.create_task(made.ask(order, Trained))  # by a new leader, while the step is under way
            await asyncio.sleep(0.05)
            made.ranks[0].gate.set()
            assert (await first).statistics == (await again).statistics
            assert (await made.ask(order, Trained)).statistics == (await first).statistics  # and when it is done
            assert made.ranks[0].calls == ["step 1"]
            newest: Weights = await made.ask(GetWeights(), Weights)
            assert newest.manifest.version == 1
            state = await made.ask(DescribeTrainer(), TrainerState)
            assert state.stepping is None
            assert state.last is not None
            assert state.last.order == order
            assert [kept.ticket for kept in state.last.kept] == ["t1", "t2"]
            assert [kept.ticket for kept in state.kept] == ["t3"]

    run(test())


def test_what_is_known_of_a_stored_trajectory_can_be_had_without_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with world(tmp_path, monkeypatch) as made:
            stored = trajectory("t1", reward=0.25)
            await made.ask(Store(stored, {"steps": 3.0}), Stored)
            state: TrainerState = await made.ask(DescribeTrainer(), TrainerState)
            (kept,) = state.kept
            assert (kept.ticket, kept.reward, kept.metrics) == ("t1", 0.25, {"steps": 3.0})
            assert kept.initiating_version == stored.initiating_version
            assert kept.sampled_tokens == stored.sampled_tokens
            assert state.weights is not None

    run(test())


def test_discarded_trajectories_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with world(tmp_path, monkeypatch) as made:
            await made.put("a", "b")
            made.node.tell(made.trainer.ref, Discard(["a", "unknown"]))
            await until(lambda: len(made.store) == 1)
            assert "b" in made.store

    run(test())


def test_a_rank_that_dies_in_a_step_fails_it_and_ends_the_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> World:
        async with world(tmp_path, monkeypatch, ranks=2) as made:
            await made.put("a", "b")
            for one in made.ranks:
                one.gate.clear()
            step = asyncio.create_task(made.ask(Train(0, [["a", "b"]]), Trained))
            await until(lambda: all(one.calls for one in made.ranks))
            assert (await made.ask(DescribeTrainer(), TrainerState)).lives
            made.children[1].died("process trainer-1 ended: killed by SIGKILL")
            with pytest.raises(PeerLost, match="killed by SIGKILL"):
                await step
            made.children[0].died("process trainer-0 ended: exit status 1")  # it misses the other one
            assert not (await made.ask(DescribeTrainer(), TrainerState)).lives
            return made

    made = run(test())
    assert [str(error) for error in made.gave_up] == ["process trainer-1 ended: killed by SIGKILL"]
    assert isinstance(made.gave_up[0], TrainerDied)
    assert all(child.stopped for child in made.children)


def test_a_rank_that_dies_before_it_is_ready_fails_whoever_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with world(tmp_path, monkeypatch, ready=False) as made:
            waiting = asyncio.create_task(made.ask(GetWeights(), Weights))
            await until(lambda: made.children and made.children[0].watchers)
            made.children[0].died("process trainer-0 ended: exit status 3; last line: no model directory")
            with pytest.raises(TrainerDied, match="last line: no model directory"):
                await waiting
            with pytest.raises(TrainerDied, match="last line"):  # and whoever comes later
                await made.ask(GetWeights(), Weights)

    run(test())


def test_ranks_that_never_come_up_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "START_TIMEOUT_S", 0.05)

    async def test() -> None:
        async with world(tmp_path, monkeypatch, ranks=2, ready=False) as made:
            await made.report(0)
            with pytest.raises(TrainerDied, match=r"not ready within 0\.05 s: trainer-1$"):
                await made.ask(GetWeights(), Weights)

    run(test())


def test_weights_come_from_rank_zero_once_all_are_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> Ref:
        async with world(tmp_path, monkeypatch, ranks=2, ready=False) as made:
            waiting = asyncio.create_task(made.ask(GetWeights(), Weights))
            await made.report(1)
            await made.report(0)
            weights: Weights = await waiting
            assert weights.source == made.ranks[0].ref
            return weights.source

    assert run(test()).actor == "rank"


def test_a_batch_that_fails_is_kept_with_its_error_and_one_that_is_done_only_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = DumpManifest(FORMAT, "job", "env", DumpFacts("bytes", 264))

    async def test() -> None:
        batches = BatchFiles(tmp_path / "run", manifest, record=True)
        async with world(tmp_path, monkeypatch, batches=batches) as made:
            await made.put("t1", "t2")
            made.ranks[0].refuses = True
            for _ in range(2):
                with pytest.raises(RemoteError, match="t1: the loss is NaN"):
                    await made.ask(Train(0, [["t1", "t2"]]), Trained)
            assert not (tmp_path / "run" / "recorded").exists()
            made.ranks[0].refuses = False
            await made.ask(Train(0, [["t1", "t2"]]), Trained)

    run(test())
    for name in ("v00001", "v00001.2"):  # the same batch, twice
        kept = tmp_path / "run" / "failed-batches" / name
        assert [held.ticket for held in read_dump(kept).trajectories] == ["t1", "t2"]
        failure = json.loads((kept / "failure.json").read_text())
        assert failure["version"] == 1
        assert failure["error"].endswith("t1: the loss is NaN")
    assert [held.ticket for held in read_dump(tmp_path / "run").trajectories] == ["t1", "t2"]


def test_a_disk_that_takes_nothing_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = DumpManifest(FORMAT, "job", "env", DumpFacts("bytes", 264))
    (tmp_path / "run").write_text("a file where the directory should be")

    async def test() -> None:
        batches = BatchFiles(tmp_path / "run", manifest, record=True)
        async with world(tmp_path, monkeypatch, batches=batches) as made:
            await made.put("t1", "t2")
            made.ranks[0].refuses = True
            with pytest.raises(RemoteError, match="t1: the loss is NaN"):
                await made.ask(Train(0, [["t1", "t2"]]), Trained)
            made.ranks[0].refuses = False
            await made.ask(Train(0, [["t1", "t2"]]), Trained)

    run(test())
    assert "the batch of version 1 failed, and could not be kept" in caplog.text
    assert "the batch of version 1 could not be recorded" in caplog.text
