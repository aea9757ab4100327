"""What a step leaves in the records, and that a run goes on where they cannot be written."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec

from actors.env.messages import Outcome
from coordinator.observe.progress import PlainProgress
from coordinator.observe.recorder import Recorder, Sampled, StepFacts
from coordinator.observe.rundir import RunDirectory
from tests.support.disks import files_up_to


def facts(version: int, statistics: dict[str, float] | None = None) -> StepFacts:
    outcome = Outcome(f"t{version}", "stored", initiating_version=version - 1, turns=1, sampled_tokens=1)
    return StepFacts(
        version=version,
        outcomes=[outcome],
        statistics=statistics or {},
        seconds={},
        in_flight=0,
        buffered=0,
        lost={},
        sampled=Sampled(version, float(version)),
    )


def test_a_full_disk_costs_records_is_said_once_a_kind_and_nothing_more(tmp_path: Path) -> None:
    words = io.StringIO()
    with RunDirectory.create(tmp_path, "lake") as run:
        recorder = Recorder(run, PlainProgress(5, words), resumed_version=None, elapsed_s=0.0)
        with files_up_to(100):
            for version in (1, 2):
                recorder.step(facts(version))
        recorder.step(facts(3))
        recorder.close("done")
        kept = run.metrics.read_bytes()
    warnings = [line for line in words.getvalue().splitlines() if line.startswith("warning: ")]
    assert [line.split()[1] for line in warnings] == ["metrics", "samples"]
    assert all("File too large" in line for line in warnings)
    assert kept.startswith(b'{"record":"step","step":3')  # no torn line before it


def test_a_steps_record_says_how_far_the_reference_is_and_what_was_clipped_and_cut(tmp_path: Path) -> None:
    figures = {"kl_reference": 0.25, "clipped_fraction": 0.5, "truncated_fraction": 0.125}
    with RunDirectory.create(tmp_path, "lake") as run:
        recorder = Recorder(run, PlainProgress(5, io.StringIO()), resumed_version=None, elapsed_s=0.0)
        recorder.step(facts(1, figures))
        recorder.close("done")
        record = msgspec.json.decode(run.metrics.read_bytes().splitlines()[0])
    assert {name: record[name] for name in figures} == figures
