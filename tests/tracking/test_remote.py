"""A tracker in a process of its own never makes a run wait or fail, whatever its library does."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from coordinator.observe.tracking.protocol import Sitting, ending
from coordinator.observe.tracking.remote import Deadlines, RemoteTracker
from tests.observe.samples import evaluation, step

SHORT = Deadlines(start_s=60.0, log_s=0.3, finish_s=0.5)
LONG = Deadlines(start_s=60.0, log_s=60.0, finish_s=60.0)


def sitting(directory: Path) -> Sitting:
    return Sitting(
        directory=str(directory), project="lakes", name="lake", mode="offline", uri="file:/nowhere", job={"seed": 1}
    )


class Place:
    """A run's directory, and what was said to its user."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.said: list[str] = []
        self.log = path / "tracker.log"

    def tracker(self, kind: str, deadlines: Deadlines = LONG) -> RemoteTracker:
        return RemoteTracker(
            f"tests.tracking.faults:{kind}", sitting(self.path), self.log, self.said.append, deadlines=deadlines
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def log_until(tracker: RemoteTracker, place: Place) -> None:
    """Log on, as a run does, until somebody is told; within a minute."""
    until = time.monotonic() + 60.0
    version = 1
    while not place.said and time.monotonic() < until:
        tracker.log_step(step(version))
        version += 1
        time.sleep(0.05)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_what_is_logged_is_kept_and_what_the_library_prints_goes_to_its_log(place: Place) -> None:
    tracker = place.tracker("Quiet")
    tracker.log_step(step(1))
    tracker.log_evaluation(evaluation(1))
    tracker.end("finished")
    tracker.close()
    tracker.close()
    assert place.said == []
    assert (tracker.records, tracker.missed) == (2, 0)
    assert place.log.read_text() == "hello from the library lake\nversion 1\nversion 1\nbye\n"
    assert gone(tracker.pid)


def test_a_library_that_fails_is_dropped_and_what_it_missed_is_counted(place: Place) -> None:
    tracker = place.tracker("FailsAtThree")
    for version in (1, 2, 3, 4):
        tracker.log_step(step(version))
    tracker.close()
    (told,) = place.said
    assert "is dropped: OSError: [Errno 28] No space left on device; the run goes on" in told
    assert (tracker.records, tracker.missed) == (4, 2)
    assert gone(tracker.pid)
    tracker.log_step(step(5))
    assert (tracker.records, tracker.missed, len(place.said)) == (5, 3, 1)


def test_a_server_that_is_not_there_is_one_line(place: Place) -> None:
    tracker = place.tracker("Unstartable")
    tracker.log_step(step(1))
    tracker.close()
    (told,) = place.said
    assert "is dropped: ConnectionError: no server at file:/nowhere; the run goes on" in told
    assert tracker.missed == 1


def test_a_library_that_hangs_is_killed_while_the_run_logs_on(place: Place) -> None:
    tracker = place.tracker("HangsAtThree", SHORT)
    log_until(tracker, place)
    assert "is dropped: it said nothing for" in place.said[0]
    assert gone(tracker.pid)
    tracker.close()
    assert tracker.missed == tracker.records - 2
    assert len(place.said) == 1


def test_a_library_that_hangs_at_the_end_holds_the_run_up_for_no_longer_than_its_deadline(place: Place) -> None:
    tracker = place.tracker("HangsAtTheEnd", SHORT)
    tracker.end("finished")
    tracker.close()
    assert "is dropped: it was not done 0.5 s after the run's end" in place.said[0]
    assert gone(tracker.pid)


def test_a_process_that_dies_is_told_with_its_last_words(place: Place) -> None:
    tracker = place.tracker("DiesAtThree")
    log_until(tracker, place)
    assert "is dropped: its process ended; its last words: cannot go on" in place.said[0]
    tracker.close()
    assert tracker.missed == tracker.records - 2


def test_a_library_that_asks_for_something_gets_nothing(place: Place) -> None:
    tracker = place.tracker("Asks")
    tracker.close()
    assert "is dropped: EOFError" in place.said[0]


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ("all 60 steps are done; checkpoint v00060 written", "finished"),
        ("interrupted; checkpoint v00012 written", "interrupted"),
        ("interrupted before anything was trained", "interrupted"),
        ("failed: the engine died", "failed"),
    ],
)
def test_a_runs_last_word_says_how_it_ended(outcome: str, expected: str) -> None:
    assert ending(outcome) == expected
