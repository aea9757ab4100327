"""Two small runs, written by hand, whose figures were worked out by hand."""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from coordinator.commands.compare import main
from coordinator.observe.comparison import curves, differences, letters, outcome, read_runs
from coordinator.observe.comparison_page import comparison_page, time_unit
from tests.observe.test_report import Page


def step_line(number: int, elapsed_s: float, **changes: Any) -> str:
    fields: dict[str, Any] = {
        "record": "step",
        "step": number,
        "version": number,
        "elapsed_s": elapsed_s,
        "reward_mean": 0.1 * number,
        "reward_std": 0.5,
        "reward_min": 0.0,
        "reward_max": 1.0,
        "reward_trend": 0.25 * number,
        "success_rate": 0.5,
        "trajectories": 16,
        "tokens": 100,
        "tokens_per_s": 200.0,
        "staleness_mean": 0.0,
        "staleness_max": 0,
        "in_flight": 16,
        "buffered": 0,
        "lost": {"stale": 3},
        "loss": -0.5,
        "grad_norm": 1.0,
        "entropy": 1.5,
        "ratio_mean": 1.0,
        "kl_rollout": 0.0,
        "seconds": {"train": 0.75},
        "turns_mean": 4.0,
    }
    return json.dumps(fields | changes)


def evaluation_line(version: int, success: float) -> str:
    fields = {"version": version, "episodes": 8, "success": success, "return_mean": success, "turns_mean": 4.0}
    return json.dumps({"record": "evaluation", **fields})


def write_run(path: Path, job: str, lines: list[str]) -> Path:
    path.mkdir()
    (path / "job.yaml").write_text(job)
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    slow = write_run(
        tmp_path / "slow <b>",
        "name: lake\nseed: 1\ntrain: {steps: 3, learning_rate: 0.001}\nenvironment: {options: {}}\n",
        [
            evaluation_line(0, 0.0),
            step_line(1, 10.0),
            step_line(2, 14.0, tokens_per_s=400.0, environment={"calls": 1.5}),
            evaluation_line(2, 0.75),
            step_line(3, 16.0, loss=None, lost={"stale": 5, "env_failed": 2}),
            evaluation_line(3, 0.5),
        ],
    )
    fast = write_run(
        tmp_path / "fast",
        "name: lake\nseed: 2\ntrain: {steps: 3}\nenvironment: {options: {}}\n",
        [step_line(1, 5.0, reward_trend=0.9), step_line(2, 6.0, loss=0.125, reward_trend=0.95, lost={})],
    )
    return [slow, fast]


def test_the_outcome_of_a_run_is_what_one_reads_in_its_lines(pair: list[Path]) -> None:
    slow, fast = map(outcome, read_runs(pair))
    assert (slow.steps, slow.seconds, slow.seconds_per_step) == (3, 16.0, 3.0)  # (16 - 10) / 2
    assert (slow.success_last, slow.success_best, slow.success_best_version) == (0.5, 0.75, 2)
    assert slow.tokens_per_s == pytest.approx(800 / 3)
    assert (slow.trajectories, slow.tokens, slow.lost) == (48, 300, 7)
    assert math.isnan(slow.loss)
    assert (fast.seconds_per_step, fast.loss, fast.reward_trend, fast.lost) == (1.0, 0.125, 0.95, 0)
    assert math.isnan(fast.success_best)
    assert fast.success_best_version is None


def test_an_evaluation_is_placed_at_the_time_of_the_step_that_made_its_version(pair: list[Path]) -> None:
    slow, fast = map(curves, read_runs(pair))
    assert slow["Success, evaluation"] == [(0, 0.0, 0.0), (2, 14.0, 0.75), (3, 16.0, 0.5)]
    assert slow["Seconds a step"] == [(2, 14.0, 4.0), (3, 16.0, 2.0)]
    assert slow["Seconds a step, train"][0] == (1, 10.0, 0.75)
    assert slow["Environment, calls"][1] == (2, 14.0, 1.5)
    assert "Success, evaluation" not in fast
    assert "Environment, calls" not in fast


def test_settings_that_differ_are_told_from_those_that_do_not(pair: list[Path]) -> None:
    differing, shared = differences([run.job for run in read_runs(pair)])
    assert differing == {"seed": ["1", "2"], "train.learning_rate": ["0.001", "(not set)"]}
    assert shared == {"name": "lake", "train.steps": "3", "environment.options": "{}"}


def test_the_page_holds_each_series_by_step_and_by_time(pair: list[Path]) -> None:
    source = comparison_page(read_runs(pair)).decode()
    page = Page(source)
    drawn: dict[str, list[Any]] = {}
    for figure in re.findall(r"<figure.*?</figure>", source, re.DOTALL):
        title = re.search(r"<figcaption>(.*?)<", figure)
        data = re.search(r'data-series="(.*?)"', figure)
        assert title is not None
        assert data is not None
        drawn.setdefault(html.unescape(title[1]), []).append(json.loads(html.unescape(data[1])))
    by_step, by_time = drawn["Reward, trend"]
    assert by_step == [
        {"label": "A", "points": [[1.0, "0.25"], [2.0, "0.50"], [3.0, "0.75"]]},
        {"label": "B", "points": [[1.0, "0.90"], [2.0, "0.95"]]},
    ]
    assert [each["points"] for each in by_time] == [
        [[10.0, "0.25"], [14.0, "0.50"], [16.0, "0.75"]],
        [[5.0, "0.90"], [6.0, "0.95"]],
    ]
    assert [one["label"] for one in drawn["Success, evaluation"][0]] == ["A"]
    assert {"Loss", "Entropy, nats a token", "Tokens/s sampled", "Seconds a step", "Success, training"} <= set(drawn)
    assert "slow <b>" in page.text()  # as text
    assert not re.search(r"(src|href)=", source)


def test_a_run_keeps_its_colour_from_the_legend_to_every_chart(pair: list[Path]) -> None:
    source = comparison_page(read_runs(pair)).decode()
    colours = set(re.findall(r'class="key" style="--c:var\((--c\d)\)">(?:<b>)?([AB])\b', source))
    assert colours == {("--c1", "A"), ("--c2", "B")}


def test_more_runs_than_colours_are_told_apart_by_dashes(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"r{n}", f"seed: {n}", [step_line(1, 1.0), step_line(2, 2.0)]) for n in range(8)]
    source = comparison_page(read_runs(runs)).decode()
    assert 'class="curve dashed" style="--c:var(--c1)"' in source


def test_the_command_prints_a_table_and_writes_the_page(
    pair: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "both.html"
    assert main([*map(str, pair), "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["A", "slow", "<b>", "3", "50%", "75%", "0.75", "-", "3.00", "0:16", "267*", "7"]
    assert lines[2].split() == ["B", "fast", "2", "-", "-", "0.95*", "0.1250", "1.00*", "0:06", "200", "0"]
    assert [line.split()[0] for line in lines[5:7]] == ["seed", "train.learning_rate"]
    Page(out.read_text())


def test_a_long_setting_is_cut_on_the_terminal_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {"a": "/models/" + "x" * 40, "b": "/models/y"}
    runs = [write_run(tmp_path / name, f"policy: {{path: {path}}}", []) for name, path in paths.items()]
    assert main([*map(str, runs), "--out", str(tmp_path / "x.html")]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("policy.path")]
    assert line.split() == ["policy.path", "/models/" + "x" * 19 + "…", "/models/y"]
    assert paths["a"] in Page((tmp_path / "x.html").read_text()).text()


def test_json_has_null_where_a_run_has_no_figure(
    pair: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*map(str, pair), "--json", "--out", str(tmp_path / "x.html")]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert [run["outcome"]["success_best"] for run in tree["runs"]] == [0.75, None]
    assert tree["runs"][0]["lost_by_reason"] == {"stale": 5, "env_failed": 2}
    assert tree["settings_that_differ"]["seed"] == ["1", "2"]


def test_unreadable_lines_are_left_out_and_said(
    pair: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (pair[1] / "metrics.jsonl").open("a") as file:
        file.write('{"record": "step", "st\n\x00\nhalf a line without an end')
    assert main([*map(str, pair), "--out", str(tmp_path / "x.html")]) == 0
    captured = capsys.readouterr()
    path = pair[1] / "metrics.jsonl"
    assert captured.err == f"warning: {path}: 2 lines could not be read and are left out\n"
    assert captured.out.splitlines()[2].split()[:3] == ["B", "fast", "2"]
    assert "2 lines could not be read" in Page((tmp_path / "x.html").read_text()).text()


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        ([], "expected two or more run directories to compare, found 0"),
        (["fast"], "expected two or more run directories to compare, found 1"),
        (["fast", "nothing"], "nothing: no such run directory"),
        (["fast", "."], "not a run directory (there is no job.yaml in it)"),
        (["fast", "fast"], "fast: the same run as"),
        (["fast", "torn"], "job.yaml: not valid YAML"),
        (["fast", "odd"], "job.yaml: not valid YAML"),
        (["fast", "list"], "job.yaml: expected a mapping, found list"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    pair: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], complaint: str
) -> None:
    for name, content in {"torn": b"a: [", "odd": b"\xff\xfe", "list": b"[1]"}.items():
        write_run(tmp_path / name, "", [])
        (tmp_path / name / "job.yaml").write_bytes(content)
    assert main([*(str(tmp_path / name) for name in names), "--out", str(tmp_path / "x.html")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert complaint in said
    assert not (tmp_path / "x.html").exists()


def test_a_page_that_cannot_be_written_is_one_line(
    pair: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "missing" / "x.html"
    assert main([*map(str, pair), "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"error: --out: {out} cannot be written: No such file or directory\n"


def test_runs_without_a_step_are_compared_all_the_same(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / name, "seed: 1", []) for name in ("a", "b")])
    text = Page(comparison_page(runs).decode()).text()
    assert "no step yet" in text
    assert "no steps yet" in text


def test_runs_are_lettered_beyond_the_alphabet() -> None:
    assert [letters(index) for index in (0, 25, 26, 51, 52, 701, 702)] == ["A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]


@pytest.mark.parametrize(
    ("longest_s", "unit"), [(0.0, "s"), (299.0, "s"), (300.0, "min"), (10799.0, "min"), (10800.0, "h")]
)
def test_the_unit_of_time_fits_the_longest_run(longest_s: float, unit: str) -> None:
    assert time_unit(longest_s)[1] == unit
