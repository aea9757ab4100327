"""The paired gain of two evaluations, worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gain import gain, main, paired


def episodes(path: Path, successes: str) -> Path:
    lines = [
        {"ticket": f"e{i}", "success": mark == "+", "transcript": [["observation", f"Q{i % 3}"], ["action", f"A{i}"]]}
        for i, mark in enumerate(successes)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_gain_is_the_mean_of_paired_differences(tmp_path: Path) -> None:
    before, after = episodes(tmp_path / "b", "+----"), episodes(tmp_path / "a", "+++--")
    figures = gain(paired(before, after))
    # differences 0 1 1 0 0: mean 0.4, variance (2 * 0.36 + 3 * 0.16) / 4 = 0.3, standard error sqrt(0.3 / 5) = 0.24495
    assert figures["gain"] == pytest.approx(0.4)
    assert figures["gain_low"] == pytest.approx(0.4 - 1.959964 * 0.2449490, abs=1e-6)
    assert figures["gain_high"] == pytest.approx(0.4 + 1.959964 * 0.2449490, abs=1e-6)
    assert (figures["episodes"], figures["questions"], figures["before"], figures["after"]) == (5, 3, 0.2, 0.6)


def test_files_of_different_tasks_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = episodes(tmp_path / "b", "+-+"), episodes(tmp_path / "a", "+-+-")
    assert main([str(before), str(after)]) == 2
    assert "of different tasks" in capsys.readouterr().err
