"""The report as a browser's parser sees it: whole, self-contained, and harmless whatever the run said."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from actors.telemetry import Span
from coordinator.job import Job
from coordinator.observe.history import read_history
from coordinator.observe.lines import LineWriter
from coordinator.observe.records import MetricRecord, SampleRecord
from coordinator.observe.report import write_report
from coordinator.observe.rundir import RunDirectory
from tests.observe.samples import evaluation, sample, step

VOID = {"meta", "br", "hr", "img", "input", "link"}
BOXES = {"path", "rect"}  # SVG elements that are written without content


class Page(HTMLParser):
    """Collects what a test asks about and refuses tags that do not match."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, str]] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []  # (path of classes and tags, text)
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.tags.append((tag, attributes))
        if tag not in VOID:
            self.open.append((tag, attributes.get("class", "")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in BOXES
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        opened, _ = self.open.pop()
        assert opened == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((" ".join(f"{tag}.{kind}" for tag, kind in self.open), data))

    def text(self, within: str = "") -> str:
        return "\n".join(text for path, text in self.texts if within in path and "style." not in path)

    def found(self, tag: str, kind: str | None = None) -> list[dict[str, str]]:
        return [
            attributes
            for name, attributes in self.tags
            if name == tag and (kind is None or kind in attributes.get("class", "").split())
        ]


def report(
    base: Path,
    metrics: Sequence[MetricRecord] = (),
    *,
    spans: list[Span] | None = None,
    samples: list[SampleRecord] | None = None,
    status: str = "running",
    job: msgspec.Struct | None = None,
) -> Page:
    with RunDirectory.create(base, "lake") as run:
        run.write_job(job or Job(name="lake"))
        for path, records in ((run.metrics, metrics), (run.timeline, spans or [])):
            writer = LineWriter(path)
            writer.write_all(records)
            writer.close()
        for one in samples or []:
            run.add_sample(one)
        return Page(write_report(run, status=status).read_text())


def test_a_run_that_has_not_done_anything_yet_has_a_report(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "lake") as run:  # not even a job
        page = Page(write_report(run).read_text())
    assert page.text("span.badge") == "running"
    assert "no values yet" in page.text("figure.card")
    assert page.found("svg") == []


def test_the_head_names_the_job_and_where_it_stands(tmp_path: Path) -> None:
    metrics: list[MetricRecord] = [
        step(1),
        step(2, tokens=1_500_000),
        evaluation(1, success=0.75),
        evaluation(2, success=0.5),
    ]
    page = report(tmp_path, metrics, status="finished")
    assert "environment frozenlake · engine auto" in page.text("p.muted")
    assert "alpha 1" in page.text("p.muted")
    assert page.text("div.tiles").split("\n") == [
        "2/60", "steps", "0:04", "time", "0.40", "reward, trend", "42%", "success, training",
        "50%", "success, evaluation v2", "75%", "best evaluation, v1",
        "128", "trajectories trained", "1.50M", "tokens trained", "1840", "tokens/s sampled", "3", "trajectories lost",
    ]  # fmt: skip
    assert page.found("span", "good")


def test_curves_carry_their_values_for_the_pointer(tmp_path: Path) -> None:
    page = report(tmp_path, [step(1, success_rate=0.25), step(2, success_rate=0.5), evaluation(2)])
    success = json.loads(page.found("div", "plot")[0]["data-series"])
    assert success == [
        {"label": "training", "points": [[1, "25%"], [2, "50%"]]},
        {"label": "evaluation", "points": [[2, "62%"]]},
    ]
    assert json.loads(page.found("div", "plot")[0]["data-range"]) == [1, 2]


def test_a_curve_goes_where_its_values_are(tmp_path: Path) -> None:
    page = report(tmp_path, [step(n, success_rate=value) for n, value in ((1, 0.0), (2, 0.25), (3, 1.0))])
    curve = next(attributes["d"] for attributes in page.found("path", "curve"))
    assert curve == "M0.0 100.00L500.0 75.00L1000.0 0.00"  # 0 is the bottom, 100 % the top of 1000 by 100


def test_nan_leaves_a_gap_and_never_reaches_the_page_as_a_coordinate(tmp_path: Path) -> None:
    metrics = [step(n, success_rate=value) for n, value in ((1, 0.0), (2, 1.0), (3, math.nan), (4, 0.5), (5, 0.5))]
    page = report(tmp_path, [*metrics, step(6, loss=math.nan, reward_mean=math.inf, grad_norm=math.nan)])
    assert page.found("path", "curve")[0]["d"].count("M") == 2
    for _, attributes in page.tags:
        for name in ("d", "style", "x", "width", "data-range"):
            assert not re.search(r"nan|inf", attributes.get(name, "")), (name, attributes)


def test_a_run_of_which_every_number_is_nan_has_a_report(tmp_path: Path) -> None:
    bad = {name: math.nan for name, value in msgspec.structs.asdict(step(1)).items() if isinstance(value, float)}
    page = report(tmp_path, [step(1, **bad), step(2, **bad), evaluation(2, success=math.nan)])
    assert "no values yet" in page.text("figure.card")
    assert "v2 (best)" in page.text("table.")


def test_hostile_text_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    attack = "</pre></div><script>alert(1)</script><img src=x onerror=alert(1)> \x00\x1b[2J\ud800 \"'&amp;"
    page = report(
        tmp_path,
        [step(1, lost={attack: 3}, seconds={attack: 1.0})],
        spans=[Span(lane=attack, kind=attack, start=1.0, end=2.0, detail=attack)],
        samples=[sample(attack, transcript=[(attack, attack), ("action", attack)])],
        status=attack,
        job=Job(name="</script><script>alert(2)</script>"),
    )
    assert len(page.found("script")) == 1  # our own
    assert page.found("img") == []
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    shown = "</pre></div><script>alert(1)</script><img src=x onerror=alert(1)> \\x00\\x1b[2J\\ud800 \"'&amp;"
    assert shown in page.text("div.turn action pre.")
    assert shown in page.text("div.card reasons")
    assert shown in page.text("rect. title.")
    assert "</script><script>alert(2)</script>" in page.text("details.card pre.")


def test_the_page_loads_nothing_and_lets_no_other_script_run(tmp_path: Path) -> None:
    page = report(
        tmp_path,
        [step(1), step(2)],
        spans=[Span(lane="trainer", kind="train", start=1.0, end=2.0)],
        samples=[sample("t")],
    )
    assert not any({"src", "href", "action", "srcset"} & attributes.keys() for _, attributes in page.tags)
    assert {tag for tag, _ in page.tags}.isdisjoint({"link", "iframe", "object", "embed", "base", "form"})
    style = "".join(text for path, text in page.texts if "style." in path)
    assert "url(" not in style
    assert "@import" not in style
    policy = next(tag["content"] for tag in page.found("meta") if "http-equiv" in tag)
    assert policy.startswith("default-src 'none';")
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/]{43}='$", policy)


def test_losses_are_listed_by_reason_most_frequent_first(tmp_path: Path) -> None:
    page = report(tmp_path, [step(1, lost={"env_failed": 1, "stale": 4, "aborted": 0})])
    assert page.text("div.card reasons").split("\n") == ["stale", "4", "env_failed", "1"]
    assert [bar["style"] for bar in page.found("div") if bar.get("style", "").startswith("width")] == [
        "width:100.0%", "width:25.0%",
    ]  # fmt: skip


def test_evaluations_are_listed_newest_first_and_the_best_is_marked(tmp_path: Path) -> None:
    successes = {5: 0.25, 10: 0.875, 15: 0.5}
    page = report(tmp_path, [evaluation(version, success=value) for version, value in successes.items()])
    cells = page.text("tbody. ").split("\n")
    assert cells[0::5] == ["v15", "v10 (best)", "v5"]
    assert cells[1::5] == ["50%", "88%", "25%"]


def test_the_best_the_worst_and_the_latest_trajectory_are_shown(tmp_path: Path) -> None:
    rewards = {"a": 0.5, "b": 1.0, "c": 0.0, "d": 1.0, "e": 0.25}
    page = report(tmp_path, samples=[sample(ticket, reward=reward) for ticket, reward in rewards.items()])
    assert [line for line in page.text("summary.").split("\n") if "reward" in line] == [
        "Latest: reward 0.25, success", "Best: reward 1.00, success", "Worst: reward 0.00, success",
    ]  # fmt: skip
    shown = page.text("p.muted")
    assert [f"trajectory {ticket}," in shown for ticket in "abcde"] == [False, False, True, True, True]


def test_long_transcripts_are_cut_with_a_word_about_it(tmp_path: Path) -> None:
    page = report(tmp_path, samples=[sample("t", transcript=[("observation", "x" * 5000)] * 205)])
    assert "… 1000 more characters are in samples/" in page.text("div.turn other")
    assert "5 more are in samples/" in page.text("div.talk")


def test_what_could_not_be_read_is_said(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "lake") as run:
        run.metrics.write_bytes(msgspec.json.encode(step(1)) + b"\n\0\0\0\n" + msgspec.json.encode(step(2)) + b'\n{"re')
        assert [record.step for record in read_history(run).steps] == [1, 2]
        page = Page(write_report(run).read_text())
    assert "1 lines of the run's files could not be read" in page.text("p.muted")


def test_the_overlap_is_put_in_words(tmp_path: Path) -> None:
    spans = [
        Span(lane="engine-0", kind="generate", start=0.0, end=10.0),
        Span(lane="trainer", kind="train", start=8.0, end=12.0),
    ]
    page = report(tmp_path, [step(1)], spans=spans)
    assert (
        "Engines generated for 10.0 s, the trainer trained for 4.0 s; both at once for 2.0 s, 50% of the training time."
    ) in page.text("p.muted")


@pytest.mark.parametrize("steps", [399, 401, 5000])
def test_a_long_run_stays_a_small_page(tmp_path: Path, steps: int) -> None:
    spans = [
        Span(lane=lane, kind=kind, start=0.1 * n, end=0.1 * n + 0.05, version=n)
        for n in range(steps)
        for lane, kind in (("engine-0", "generate"), ("trainer", "train"), ("env", "reset"))
    ]
    report(tmp_path, [step(n, loss=math.sin(n)) for n in range(1, steps + 1)], spans=spans)
    assert (tmp_path / "latest" / "report.html").stat().st_size < 1_500_000
