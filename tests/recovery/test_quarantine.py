"""Hosts that keep failing are left out, each time for longer; the times are those of the module's docstring."""

from __future__ import annotations

from pathlib import Path

from coordinator.hostbook import HostBook
from coordinator.quarantine import Quarantine

MINUTE, DAY = 60.0, 24 * 3600.0


def fails(quarantine: Quarantine, now: float, times: int = 3) -> float:
    return [quarantine.failed("h", now + 20 * each) for each in range(times)][-1]


def test_roles_that_go_with_their_host_at_once_count_once() -> None:
    quarantine = Quarantine()
    assert [quarantine.failed("h", now) for now in (0.0, 1.0, 2.0, 14.0)] == [0.0] * 4
    assert quarantine.failures("h", 20.0) == 1
    assert [quarantine.failed("h", now) for now in (20.0, 40.0)] == [0.0, 10 * MINUTE]


def test_the_third_failure_within_ten_minutes_counts() -> None:
    quarantine = Quarantine()
    assert [quarantine.failed("h", now) for now in (0.0, 5 * MINUTE, 10 * MINUTE + 1)] == [0.0, 0.0, 0.0]
    assert quarantine.failed("other", 11 * MINUTE) == 0.0
    assert quarantine.barred(11 * MINUTE) == {}
    assert quarantine.failed("h", 11 * MINUTE) == 10 * MINUTE
    assert quarantine.barred(12 * MINUTE) == {"h": 9 * MINUTE}
    assert quarantine.barred(21 * MINUTE) == {}


def test_every_quarantine_is_twice_as_long_and_a_day_at_most() -> None:
    quarantine, now, lengths = Quarantine(), 0.0, []
    for _ in range(10):
        lengths.append(fails(quarantine, now))
        now += 40 + lengths[-1] + 1
    assert lengths[:8] == [10 * MINUTE * 2**n for n in range(8)]
    assert lengths[8:] == [DAY, DAY]


def test_a_day_without_one_is_forgiven() -> None:
    quarantine = Quarantine()
    assert fails(quarantine, 0.0) == 10 * MINUTE
    assert fails(quarantine, 10 * MINUTE + DAY - 60) == 20 * MINUTE
    assert fails(quarantine, 10 * DAY) == 10 * MINUTE


def test_what_fails_in_quarantine_changes_nothing() -> None:
    quarantine = Quarantine()
    fails(quarantine, 0.0)
    assert quarantine.failed("h", 41.0) == 10 * MINUTE - 1
    assert fails(quarantine, 11 * MINUTE, times=2) == 0.0


def test_a_person_lets_a_host_back_in() -> None:
    quarantine = Quarantine()
    assert not quarantine.release("h", 0.0)
    fails(quarantine, 0.0)
    assert quarantine.release("h", 50.0)
    assert quarantine.barred(50.0) == {}
    assert quarantine.failures("h", 50.0) == 0
    assert fails(quarantine, 60.0) == 20 * MINUTE


def test_failures_count_where_the_next_leaders_clock_is_behind() -> None:
    quarantine = Quarantine()
    assert [quarantine.failed("h", now) for now in (1000.0, 700.0, 710.0)] == [0.0] * 3  # the last two are one blow
    assert quarantine.failures("h", 720.0) == 2
    assert quarantine.failed("h", 730.0) == 10 * MINUTE


def test_the_next_leader_leaves_out_the_same_hosts(tmp_path: Path) -> None:
    now = [1000.0]
    path = tmp_path / "hosts.jsonl"
    book = HostBook(path, lambda: now[0])
    for _ in range(3):
        now[0] += 20.0
        book.fell("failed", "10.0.0.2", "proxy-1", ["proxy"], "no engine is left")
        book.fell("lost", "10.0.0.3", "env-2", ["env"], "its process has ended") if now[0] < 1060.0 else None
    book.close()
    now[0] += 60.0
    following = HostBook(path, lambda: now[0])
    assert following.barred() == {"10.0.0.2": 540.0}
    assert following.failures("10.0.0.3") == 2
    assert following.release("10.0.0.2")
    following.close()
    assert HostBook(path, lambda: now[0]).barred() == {}
    events = [line.split('"event":"')[1].split('"')[0] for line in path.read_text().splitlines()]
    assert events == ["failed", "lost", "failed", "lost", "failed", "quarantined", "released"]
