"""A run goes on where its records cannot be written."""

from __future__ import annotations

import io
from pathlib import Path

from actors.env.messages import Outcome
from coordinator.observe.progress import PlainProgress
from coordinator.observe.recorder import Recorder, Sampled, StepFacts
from coordinator.observe.rundir import RunDirectory
from tests.support.disks import files_up_to


def facts(version: int) -> StepFacts:
    outcome = Outcome(f"t{version}", "stored", initiating_version=version - 1, turns=1, sampled_tokens=1)
    return StepFacts(
        version=version,
        outcomes=[outcome],
        statistics={},
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
