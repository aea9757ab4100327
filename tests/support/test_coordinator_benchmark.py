"""The load of the coordinator's benchmark: scaled as it says, and charged for what waits."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from benchmarks.coordinator.load import Latencies, at_their_times
from benchmarks.coordinator.trace import Arrival, Trace, Written, arrivals, load, paths, rate
from bus.virtual_time import run

TWO_A_JOB = Trace(
    10.0,
    0,
    [Written(1.0, "/jobs/JOB/status", 32, ephemeral=False), Written(4.0, "/jobs/JOB/nodes/n/binding", 280, False)],
)


def test_each_host_of_eight_gpus_writes_what_one_job_does() -> None:
    assert rate(TWO_A_JOB, 512) == pytest.approx(64 * 2 / 10.0)
    due = arrivals(TWO_A_JOB, 512, 30.0, seed=0)
    assert len(due) == 64 * 2 * 3
    assert [arrival.at_s for arrival in due] == sorted(arrival.at_s for arrival in due)
    assert {arrival.path for arrival in due} == set(paths(TWO_A_JOB, 512))
    of_one = [arrival.at_s for arrival in due if arrival.path == "/jobs/bench-0007/status"]
    assert [after - before for before, after in itertools.pairwise(of_one)] == pytest.approx([10.0, 10.0])
    assert due == arrivals(TWO_A_JOB, 512, 30.0, seed=0)


def test_the_recorded_job_began_ran_and_ended() -> None:
    trace = load()
    statuses = [written for written in trace.writes if written.path == "/jobs/JOB/status"]
    assert len(statuses) > 5
    assert {written.path for written in trace.writes} > {"/jobs/JOB/nodes/control/affinity"}
    assert all(0 <= written.at_s <= trace.seconds for written in trace.writes)


def test_a_write_that_waits_for_a_stalled_store_is_charged_from_when_it_was_due() -> None:
    """One write a second; the store stands still from 3 s to 8 s, and takes 10 ms otherwise."""

    async def scenario() -> Latencies:
        loop = asyncio.get_running_loop()
        start = loop.time()

        async def write(path: str, value: bytes) -> None:
            await asyncio.sleep(max(0.0, start + 8 - loop.time()) if loop.time() - start >= 3 else 0.0)
            await asyncio.sleep(0.01)

        return await at_their_times([Arrival(float(second), "/a", 1) for second in range(20)], 20.0, write)

    found = run(scenario())
    assert found.offered_per_s == 1.0
    assert found.p50_ms == pytest.approx(10, abs=1)
    assert found.worst_ms == pytest.approx(5010, abs=1)
    assert found.p99_ms == pytest.approx(5010, abs=1)
