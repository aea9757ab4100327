"""The trajectory store: durable, and honest about what it cannot read."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest

from actors.trainer import store as store_module
from actors.trainer.store import (
    StoreCorrupt,
    TrajectoryStore,
    UnknownTrajectory,
    append_record,
    read_records,
    write_records,
)
from bus.codec import dumps
from tests.support.disks import files_up_to
from tests.trainer_actor.support import trajectory

HEAD = 8
"""Bytes before the first record."""


def tickets(store: TrajectoryStore) -> list[str]:
    return [held.ticket for held in store.held()]


def filled(path: Path, *names: str) -> bytes:
    """A file with these trajectories; its content is returned."""
    store = TrajectoryStore(path)
    for name in names:
        store.put(trajectory(name))
    store.close()
    return path.read_bytes()


def same(one: object, other: object) -> bool:
    return dumps(one) == dumps(other)


def test_what_was_put_is_there_and_after_reopening_too(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log"
    store = TrajectoryStore(path)
    store.put(trajectory("a", reward=0.25))
    assert same(store.get("a"), trajectory("a", reward=0.25))
    again = TrajectoryStore(path)  # the first one was never closed
    assert tickets(again) == ["a"]
    assert same(again.get("a"), trajectory("a", reward=0.25))
    assert "a" in again
    assert len(again) == 1


def test_what_was_acknowledged_survives_a_process_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from actors.trainer.store import TrajectoryStore\n"
        "from tests.trainer_actor.support import trajectory\n"
        "store = TrajectoryStore(Path(sys.argv[1]))\n"
        "for index in range(50):\n"
        "    store.put(trajectory(f't{index}'))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    process = subprocess.run(
        [sys.executable, "-c", program, str(path)], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=False
    )
    assert process.returncode == -signal.SIGKILL
    assert tickets(TrajectoryStore(path)) == [f"t{index}" for index in range(50)]


def test_a_trajectory_that_comes_twice_is_kept_once(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "log")
    store.put(trajectory("a", reward=1.0))
    size = (tmp_path / "log").stat().st_size
    store.put(trajectory("a", reward=1.0))
    assert (tmp_path / "log").stat().st_size == size
    assert len(store) == 1


def test_an_unknown_ticket_is_named(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "log")
    with pytest.raises(UnknownTrajectory, match="trajectory t7 is not in the store, which holds 0"):
        store.get("t7")


@pytest.mark.parametrize("cut", [1, 5, 11, 12, 40])
def test_a_torn_record_at_the_end_is_dropped_and_does_not_spoil_what_follows(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "log"
    whole = filled(path, "a")
    content = filled(path, "b")
    path.write_bytes(content[: len(whole) + cut])
    store = TrajectoryStore(path)
    assert tickets(store) == ["a"]
    store.put(trajectory("c"))
    store.close()
    assert tickets(TrajectoryStore(path)) == ["a", "c"]


def test_a_changed_byte_in_the_middle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first = len(filled(path, "a"))
    content = bytearray(filled(path, "b", "c"))
    content[first + 20] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreCorrupt, match=f"the record at offset {first} does not fit its checksum"):
        TrajectoryStore(path)


def test_a_changed_length_is_refused_and_not_taken_for_a_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    content = bytearray(filled(path, "a", "b"))
    content[HEAD + 3] ^= 0x40  # a gigabyte more
    path.write_bytes(content)
    with pytest.raises(StoreCorrupt, match=f"the record at offset {HEAD} has a length that does not fit"):
        TrajectoryStore(path)


@pytest.mark.parametrize("head", [b"", b"RATRAJ\x01\x00", b"RATRAJ\x02\x00"])
def test_a_whole_record_of_something_else_is_refused(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "log"
    blob = dumps({"not": "a trajectory"})
    record = struct.pack("<III", len(blob), zlib.crc32(struct.pack("<I", len(blob))), zlib.crc32(blob)) + blob
    path.write_bytes(head + record)
    with pytest.raises(StoreCorrupt, match="is whole, but no trajectory"):
        TrajectoryStore(path)


def test_compacting_keeps_what_is_held_and_frees_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "log"
    alone = len(filled(tmp_path / "alone", "b"))
    store = TrajectoryStore(path)
    for name in "abc":
        store.put(trajectory(name))
    store.drop(["a", "c", "unknown"])
    store.compact()
    assert path.stat().st_size == alone
    store.put(trajectory("d"))
    assert tickets(TrajectoryStore(path)) == ["b", "d"]
    assert sorted(os.listdir(tmp_path)) == ["alone", "log"]


def test_the_file_does_not_grow_with_the_length_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    record = len(filled(tmp_path / "one", "t000")) - HEAD
    monkeypatch.setattr(store_module, "SLACK_BYTES", 4 * record)
    store = TrajectoryStore(path)
    for index in range(200):
        store.put(trajectory(f"t{index:03d}"))
        store.drop([f"t{index - 2:03d}"])
        assert path.stat().st_size <= HEAD + (2 * 2 + 4 + 1) * record
    assert tickets(TrajectoryStore(path))[-2:] == ["t198", "t199"]


def test_a_store_can_start_from_a_checkpoints_copy_instead_of_its_own_file(tmp_path: Path) -> None:
    path, copy = tmp_path / "log", tmp_path / "copy"
    filled(path, "a", "b", "late")
    write_records(copy, [trajectory("a"), trajectory("b", reward=2.0)])
    store = TrajectoryStore(path, start_from=copy)
    assert tickets(store) == ["a", "b"]
    assert store.get("b").reward == 2.0
    store.put(trajectory("c"))
    assert [held.ticket for held, _ in read_records(path)] == ["a", "b", "c"]
    assert [held.ticket for held, _ in read_records(copy)] == ["a", "b"]


def test_a_full_disk_refuses_a_trajectory_by_name_and_leaves_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    record = len(filled(tmp_path / "one", "a"))
    store = TrajectoryStore(path)
    store.put(trajectory("a"))
    with files_up_to(record + record // 2), pytest.raises(OSError, match=r"File too large: '.*log'"):
        store.put(trajectory("b"))
    assert ("b" in store, path.stat().st_size) == (False, record)
    store.put(trajectory("c"))
    assert [held.ticket for held, _ in read_records(path)] == ["a", "c"]


def test_a_full_disk_keeps_a_store_from_being_rewritten_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    record = (len(filled(path, "a", "b", "c")) - HEAD) // 3
    monkeypatch.setattr(store_module, "SLACK_BYTES", -3 * record)
    store = TrajectoryStore(path)
    with files_up_to(record):
        store.drop(["b"])
    assert tickets(store) == ["a", "c"]
    assert [held.ticket for held, _ in read_records(path)] == ["a", "b", "c"]
    assert os.listdir(tmp_path) == ["log"]


@pytest.mark.parametrize("format_", [0, 1])
def test_a_file_of_an_older_format_is_read_and_gone_on_with(tmp_path: Path, format_: int) -> None:
    path = tmp_path / "log"
    shutil.copy(Path(__file__).parent / "older" / f"trajectories-{format_}.log", path)
    assert [held.ticket for held, _ in read_records(path)] == ["a", "b"]
    store = TrajectoryStore(path)
    assert tickets(store) == ["a", "b"]
    assert same(store.get("b"), trajectory("b", reward=0.25))
    store.put(trajectory("c"))
    assert path.read_bytes().startswith(b"RATRAJ\x02\x00")
    assert tickets(TrajectoryStore(path)) == ["a", "b", "c"]
    assert os.listdir(tmp_path) == ["log"]


def test_a_full_disk_keeps_an_older_file_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log"
    shutil.copy(Path(__file__).parent / "older" / "trajectories-1.log", path)
    recorded = path.read_bytes()
    with files_up_to(100), pytest.raises(OSError, match="File too large"):
        TrajectoryStore(path)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (recorded, ["log"])


def test_one_more_is_added_to_a_file_of_an_older_format(tmp_path: Path) -> None:
    path = tmp_path / "log"
    shutil.copy(Path(__file__).parent / "older" / "trajectories-1.log", path)
    append_record(path, trajectory("c"))
    assert [held.ticket for held, _ in read_records(path)] == ["a", "b", "c"]


def test_what_is_held_is_read_while_the_file_is_rewritten(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "log")
    for index in range(20):
        store.put(trajectory(f"t{index}", reward=index))
    wrong: list[object] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            wrong.extend(found for index in (3, 17) if (found := store.get(f"t{index}").reward) != index)
            store.copy(tmp_path / "copy")
            wrong.extend(held for held, _ in read_records(tmp_path / "copy") if held.reward != int(held.ticket[1:]))

    thread = threading.Thread(target=read)
    thread.start()
    for index in range(20):
        if index not in (3, 17):
            store.drop([f"t{index}"])
            store.compact()
    stop.set()
    thread.join(timeout=30.0)
    assert not thread.is_alive()
    assert wrong == []
    assert tickets(store) == ["t3", "t17"]


def test_what_a_step_is_made_of_is_the_same_before_and_after_a_restart(tmp_path: Path) -> None:
    given = trajectory("a")
    given.segments[0].logprobs[2] = -0.123456789
    store = TrajectoryStore(tmp_path / "log")
    store.put(given)
    assert same(store.get("a"), TrajectoryStore(tmp_path / "log").get("a"))
    assert 0 < abs(float(store.get("a").segments[0].logprobs[2]) + 0.123456789) < 2.0**-16


def test_a_file_of_newer_software_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"RATRAJ\x03\x00 what is to come")
    with pytest.raises(StoreCorrupt, match=r"log: a file of trajectories of format 3, of newer software; .* upgrade"):
        TrajectoryStore(path)
    assert path.read_bytes() == b"RATRAJ\x03\x00 what is to come"


@pytest.mark.parametrize("length", range(8))
def test_a_file_whose_head_was_torn_begins_anew(tmp_path: Path, length: int) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"RATRAJ\x02\x00"[:length])
    TrajectoryStore(path).put(trajectory("a"))
    assert tickets(TrajectoryStore(path)) == ["a"]


def test_records_that_do_not_fit_on_a_full_disk_leave_no_part_of_a_file(tmp_path: Path) -> None:
    with files_up_to(100), pytest.raises(OSError, match="File too large"):
        write_records(tmp_path / "log", [trajectory("a"), trajectory("b")])
    assert os.listdir(tmp_path) == []
