"""Each tool beside a process whose trouble is known, by every way that this machine has."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from typing import IO

import pytest

from hwprobe.tracing.report import How, Report
from tests.tracing.loads import BUSY, PAGES, READS, SLEEPS, TOUCHES, running, traced

BOTH: list[How] = ["sampling", "bpf"]


def row(report: Report, pid: int) -> dict[str, float]:
    (entry,) = [entry for entry in report.entries if entry.name.endswith(f" {pid}")]
    return entry.figures


@pytest.mark.parametrize("how", BOTH)
def test_a_sleeping_process_is_off_the_cpu_and_where_it_sleeps_is_told(how: How) -> None:
    with running(SLEEPS) as sleeper:
        report = traced("offcpu", how, sleeper.pid)
    figures = row(report, sleeper.pid)
    assert figures["waited_ms"] > 2 * figures["ran_ms"]
    # The kernel's counters and the clock are one account: waiting, queueing and running make up the whole time.
    whole = figures["waited_ms"] + figures["in_queue_ms"] + figures["ran_ms"]
    assert whole == pytest.approx(report.seconds * 1000, rel=0.25)
    where = max(report.folded, key=lambda stack: report.folded[stack])
    assert "nanosleep" in where
    assert where.startswith("python")


@pytest.mark.parametrize("how", BOTH)
def test_two_busy_processes_on_one_core_wait_for_each_other(how: How) -> None:
    cpu = min(os.sched_getaffinity(0))
    with ExitStack() as stack:
        pids = [stack.enter_context(running(BUSY, cpu=cpu)).pid for _ in range(2)]
        report = traced("runqueue", how, *pids, seconds=1.5)
    figures = [row(report, pid) for pid in pids]
    # One of them runs at a time, so that between them they wait at least as long as it takes; what the one that waits
    # at the end has waited is not counted yet.
    assert sum(one["waited_ms"] for one in figures) > 0.5 * report.seconds * 1000
    assert all(one["times"] > 0 for one in figures)
    if how == "bpf":
        # Waits are as many as the times they got a CPU, but for those at the edges; somebody waited longer than a tick.
        assert sum(bucket.count for bucket in report.histogram) > 0
        assert max(one["longest_ms"] for one in figures) >= 1.0


@pytest.mark.parametrize("how", BOTH)
def test_a_slow_call_is_named_with_how_long_it_takes(how: How) -> None:
    with running(READS) as reader:
        report = traced("syscalls", how, reader.pid)
    (figures,) = [entry.figures for entry in report.entries if entry.name.endswith(" read")]
    assert figures["slow"] >= 1
    if how == "bpf":
        assert figures["longest_ms"] >= 300  # nothing is written before
        assert figures["total_ms"] >= figures["longest_ms"]
    else:
        assert figures["longest_at_least_ms"] >= 100
    assert any(stack.endswith(";read") for stack in report.folded)


@pytest.mark.parametrize("how", BOTH)
def test_touched_pages_are_counted_to_the_page(how: How) -> None:
    with running(TOUCHES) as toucher:
        assert toucher.stdin is not None
        # It waits until it is watched: compiling a BPF program takes seconds.
        timer = threading.Timer(0.5, _tell, [toucher.stdin])
        report = traced("faults", how, toucher.pid, seconds=2.0, say=lambda line: timer.start())
    figures = row(report, toucher.pid)
    assert PAGES <= figures["faults"] < PAGES + 500  # the interpreter's own
    assert figures["from_disk"] == 0
    assert sum(report.folded.values()) == pytest.approx(figures["faults"], rel=0.1)


def _tell(pipe: IO[bytes]) -> None:
    pipe.write(b"x")
    pipe.flush()


def test_the_function_that_takes_the_time_is_in_the_python_stacks() -> None:
    with running("def known_to_be_busy():\n    while True: pass\nknown_to_be_busy()") as busy:
        report = traced("stacks", "py-spy", busy.pid)
    assert sum(report.folded.values()) > 0
    seen = sum(weight for stack, weight in report.folded.items() if "known_to_be_busy" in stack)
    assert seen / sum(report.folded.values()) > 0.9


def test_a_busy_process_has_native_stacks_by_bpf() -> None:
    with running(BUSY) as busy:
        report = traced("stacks", "bpf", busy.pid)
    assert sum(report.folded.values()) > 0
    assert all(stack.startswith("python") for stack in report.folded)


def test_without_anything_to_read_frames_cpu_time_is_told_by_thread() -> None:
    with running(BUSY) as busy:
        report = traced("stacks", "sampling", busy.pid)
    (on_cpu,) = [weight for stack, weight in report.folded.items() if stack.endswith(";(on a CPU)")]
    assert on_cpu == pytest.approx(row(report, busy.pid)["ran_ms"] * 1000, abs=1.5)  # one is rounded, the other cut
    assert on_cpu > 0


def test_children_that_start_later_are_followed() -> None:
    code = """
    time.sleep(0.3)
    os.fork()
    time.sleep(600)
    """
    with running(code) as parent:
        report = traced("offcpu", "sampling", parent.pid, seconds=2.0)
    assert report.processes == 2
