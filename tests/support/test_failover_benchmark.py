"""What the judge of fail-overs calls holding, and that its crowd is there and goes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from benchmarks.coordinator.crowd import hogs, runnable
from benchmarks.coordinator.failover import Verdict, table

CALM = Verdict(
    minutes=60,
    overcommit=2,
    runnable_per_core=8.1,
    steps=1_000,
    false_failovers=[],
    uncertain=3,
    longest_uncertain_s=0.4,
    alarms=0,
    led_after_s=0.3,
    booked_after_s=1.2,
    admitted_after_s=4.9,
    step_after_s=9.0,
)


def test_moments_of_uncertainty_are_no_fail_over_but_each_other_leader_is() -> None:
    assert CALM.holds
    assert not msgspec.structs.replace(CALM, false_failovers=["its session was lost"]).holds
    assert "its session was lost" in table(msgspec.structs.replace(CALM, false_failovers=["its session was lost"]))


def test_a_dead_leader_is_to_be_succeeded_within_five_seconds() -> None:
    assert msgspec.structs.replace(CALM, led_after_s=4.9, step_after_s=60.0).holds
    assert not msgspec.structs.replace(CALM, led_after_s=5.0).holds


def children() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


def test_the_crowd_wants_to_run_and_is_gone_afterwards() -> None:
    before = children()
    with hogs(2):
        assert len(children() - before) == 2
        deadline = time.monotonic() + 60.0
        while runnable() < 3:  # they and this one
            assert time.monotonic() < deadline, "they do not run"
    assert children() == before
