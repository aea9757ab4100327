"""Checkpoints: whole or not at all, and which of them stay."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from coordinator.checkpoints import FORMAT, RUN_FILE, Checkpoints, CheckpointUnusable, RunCheckpoint
from coordinator.scheduling.ledger import Balance, Ledger
from coordinator.scheduling.rolling import RollingScheduler, Rules, SchedulerState

OLDER = Path(__file__).parent / "older"
"""What earlier formats looked like."""


def state(version: int, best: float | None = None) -> RunCheckpoint:
    balance = Balance(admitted=0, trained=0, lost={}, evicted={}, in_flight=0, buffered=0, taken=0)
    return RunCheckpoint(FORMAT, version, SchedulerState(5, 40, [], balance, [], 0), best, elapsed_s=1.5)


async def ranks(directory: Path) -> None:
    (directory / "rank").mkdir()
    (directory / "rank" / "weights").write_bytes(b"w" * 100)


def write(checkpoints: Checkpoints, version: int, best: float | None = None) -> Path:
    return asyncio.run(checkpoints.write(state(version, best), ranks))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    path = write(checkpoints, 20, best=0.75)
    assert path == tmp_path / "checkpoints" / "v00020"
    assert (path / "rank" / "weights").read_bytes() == b"w" * 100
    assert checkpoints.read(20) == checkpoints.newest() == state(20, 0.75)
    assert checkpoints.path(20) == path


def test_an_end_while_the_ranks_write_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 1)

    async def killed(directory: Path) -> None:
        (directory / "half").write_bytes(b"x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(checkpoints.write(state(2), killed))
    assert checkpoints.versions() == [1]
    assert Checkpoints(tmp_path, keep=2).newest() == state(1)
    write(checkpoints, 2)
    assert names(tmp_path) == ["v00001", "v00002"]  # the half one is gone
    assert not (tmp_path / "v00002" / "half").exists()


def test_an_end_between_writing_and_naming_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write(checkpoints, 2)
    assert Checkpoints(tmp_path, keep=2).versions() == [1]


def test_an_end_while_an_old_one_is_deleted_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    write(checkpoints, 1)

    def killed(path: Path, **_: bool) -> None:
        (path / RUN_FILE).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            write(checkpoints, 2)
    again = Checkpoints(tmp_path, keep=1)
    assert again.versions() == [2]
    write(again, 3)
    assert names(tmp_path) == ["v00003"]


def test_everything_is_on_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    rename = Path.rename

    def noted(path: Path, target: Path) -> Path:
        order.append("rename")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", noted)
    monkeypatch.setattr("coordinator.checkpoints.os.fsync", lambda _: order.append("sync"))
    write(Checkpoints(tmp_path, keep=1), 1)
    # run.json, rank/, rank/weights and the directory itself; then the directory that has the new name
    assert order == ["sync"] * 4 + ["rename", "sync"]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for version in (1, 2, 3):
        write(checkpoints, version)
        if version == 1:
            checkpoints.mark_best(1)
    assert checkpoints.versions() == [1, 2, 3]
    write(checkpoints, 4)
    assert checkpoints.versions() == [1, 3, 4]
    checkpoints.mark_best(4)
    assert checkpoints.versions() == [3, 4]
    assert Checkpoints(tmp_path, keep=2).best() == 4


def test_the_same_version_is_saved_again_with_what_was_gathered_since(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 3, best=0.25)
    path = write(checkpoints, 3, best=0.5)
    assert names(tmp_path) == ["v00003.1"]
    assert checkpoints.newest() == state(3, 0.5)
    for _ in range(10):
        path = write(checkpoints, 3)
    assert names(tmp_path) == ["v00003.11"]  # not by the order of letters
    assert checkpoints.path(3) == path


def test_versions_are_ordered_by_number(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for version in (99_999, 100_000, 2):
        write(checkpoints, version)
    assert checkpoints.versions() == [2, 99_999, 100_000]
    assert checkpoints.newest().version == 100_000


def test_only_a_version_that_is_there_can_be_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    with pytest.raises(CheckpointUnusable, match="there is no checkpoint of version 7"):
        checkpoints.mark_best(7)
    assert checkpoints.best() is None
    (tmp_path / "best").write_text("seven")
    assert checkpoints.best() is None


def test_a_directory_without_checkpoints_says_so(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    checkpoints = Checkpoints(tmp_path, keep=1)
    with pytest.raises(CheckpointUnusable, match="there is no checkpoint to resume from"):
        checkpoints.newest()
    assert Checkpoints(tmp_path / "missing", keep=1).versions() == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"format": 99, "anything": true}', "a checkpoint of format 99, of newer software; this software ("),
        (b'{"format": 0, "anything": true}', "a checkpoint of format 0, of older software; this software ("),
        (b'{"version": 1}', "a checkpoint that says no format"),
        (b"{", "not a run's checkpoint: Input data was truncated"),
        (b"\xff\xfe{}", "not a run's checkpoint"),
        (b'{"format": 2, "version": 1}', "not a run's checkpoint: Object missing required field `scheduler`"),
        (json.dumps({"format": 2, "version": "one"}).encode(), "not a run's checkpoint"),
    ],
)
def test_a_foreign_or_damaged_checkpoint_is_one_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    path = write(checkpoints, 1)
    (path / RUN_FILE).write_bytes(content)
    with pytest.raises(CheckpointUnusable) as caught:
        checkpoints.newest()
    assert str(caught.value).startswith(f"{path / RUN_FILE}: {message}")
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_the_first_format_is_gone_on_from(tmp_path: Path) -> None:
    (tmp_path / "v00003").mkdir()
    shutil.copy(OLDER / "run-1.json", tmp_path / "v00003" / RUN_FILE)
    found = Checkpoints(tmp_path, keep=1).newest()
    assert (found.version, found.best_success, found.elapsed_s) == (3, 0.5, 12.5)
    rules = Rules(groups_per_step=2, group_size=2, alpha=1, redundant_groups=0, temperature=1.0, seed=0)
    scheduler = RollingScheduler(rules, Ledger())
    scheduler.restore(found.scheduler, found.version, ["t4", "t5", "t6"])
    # Of nine, four were trained on and one was lost; the one that ran had no name, is lost now, and runs again.
    expected = Balance(10, 4, {"env_failed": 1, "interrupted": 1}, {}, in_flight=1, buffered=3, taken=0)
    assert scheduler.ledger.balance() == expected
    assert {ticket.id for ticket in scheduler.to_start}.isdisjoint({f"t{number}" for number in range(9)})


def test_a_checkpoint_without_its_run_file_is_one_clear_error(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    (write(checkpoints, 1) / RUN_FILE).unlink()
    with pytest.raises(CheckpointUnusable, match=r"run\.json: No such file or directory"):
        checkpoints.read(1)
