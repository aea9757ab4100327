"""The ledger's journal on disk: readable by anybody, whole after a crash, and enough to go on from."""

from __future__ import annotations

import json
from pathlib import Path

from actors.trainer.store import TrajectoryStore
from coordinator.books import Books
from coordinator.checkpoints import FORMAT, RunCheckpoint
from coordinator.job import Job
from coordinator.observe.rundir import RunDirectory
from coordinator.scheduling.journal import Event, FileJournal, read_journal, read_losses
from tests.scheduling.support import lost, started, stored
from tests.support.audit import audited_file
from tests.trainer_actor.support import trajectory


def test_what_is_written_is_there_at_once_as_plain_json_and_a_torn_line_is_not(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    journal = FileJournal(path)
    journal.write([Event("admitted", ["t0"]), Event("stored", ["t0"], 3)])
    mark = journal.mark()
    journal.write([Event("lost", ["t1"], reason="env_failed", detail="why")])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"event": "admitted", "tickets": ["t0"]},
        {"event": "stored", "tickets": ["t0"], "version": 3},
        {"event": "lost", "tickets": ["t1"], "reason": "env_failed", "detail": "why"},
    ]
    with path.open("ab") as file:
        file.write(b'{"event":"lost","tick')
    assert read_journal(path, mark) == [Event("lost", ["t1"], reason="env_failed", detail="why")]
    assert len(read_journal(path)) == 3
    assert read_journal(tmp_path / "none") == []


def test_losses_are_those_of_the_history_that_counts(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    FileJournal(path).write(
        [
            Event("lost", ["t1"], reason="env_failed", detail="why"),
            Event("evicted", ["t2"], reason="stale"),
            Event("resumed", ["t2"], 1),
            Event("lost", ["t3", "t4"], reason="interrupted"),
        ]
    )
    losses = read_losses(path)
    assert losses.counts == {"env_failed": 1, "interrupted": 2}
    assert losses.details == {"env_failed": "why"}


def test_books_of_a_run_that_was_killed_know_what_the_checkpoint_and_the_journal_do_not(tmp_path: Path) -> None:
    """Two groups of eight at alpha 1 (four admitted, 32 tickets). At the checkpoint t0 is stored. Then t1 is stored and
    reported, t2 is stored and killed before its report, t3 is lost (and t32 runs in its place)."""
    job = Job()
    with RunDirectory.create(tmp_path, "lake") as run:
        store = TrajectoryStore(run.path / "store" / "trajectories.log")
        before = Books.of_sitting(job, run, None, None)
        before.scheduler.open()
        first = [ticket.id for ticket in started(before.scheduler)]
        store.put(trajectory("t0"))
        before.scheduler.stored(stored("t0"))
        copy = tmp_path / "v00000"
        copy.mkdir()
        (copy / "trajectories.log").write_bytes((run.path / "store" / "trajectories.log").read_bytes())
        checkpoint = RunCheckpoint(FORMAT, 0, before.scheduler.state(), None, 1.0)
        store.put(trajectory("t1"))
        before.scheduler.stored(stored("t1"))
        store.put(trajectory("t2"))
        before.scheduler.lost(lost("t3"))

        after = Books.of_sitting(job, run, checkpoint, copy)
        balance = after.scheduler.ledger.balance()
        assert balance.holds
        # In the rerun group only the seven members beside t0 are admitted anew; the other groups run whole again.
        assert balance.admitted == len(first) + 1 + (len(first) - 1)
        assert balance.lost == {"unsaved": 2, "env_failed": 1, "interrupted": len(first) - 4 + 1}
        assert (balance.buffered, balance.in_flight) == (1, len(first) - 1)
        assert not set(after.scheduler.ledger.live()) & {*first[1:], f"t{len(first)}"}  # no name is given twice
        after.close()
        audit = audited_file(run.ledger)
        assert audit.lost == {"unsaved": 2, "env_failed": 1, "interrupted": len(first) - 4 + 1}
