"""What a report reads of a run: the same figures, in memory that does not grow with the run."""

import random
from pathlib import Path

from actors.telemetry import Span
from coordinator.observe.history import MOST_STEPS, Spans, Thinned, coarser, read_history
from coordinator.observe.lines import LineWriter
from coordinator.observe.overlap import overlap
from coordinator.observe.rundir import RunDirectory
from tests.observe.samples import sample, step


def work(count: int) -> list[Span]:
    """Engine and trainer, in steps of ten seconds: 6 s of generation in three pieces, 5 s of training from 4 s on."""
    spans = []
    for number in range(count):
        start = 10.0 * number
        spans += [Span("engine-0", "generate", start + 2 * piece, start + 2 * piece + 2) for piece in range(3)]
        spans.append(Span("trainer", "train", start + 4, start + 9, version=number))
    return spans


def test_thinned_ones_are_evenly_spread_and_have_the_newest() -> None:
    thinned = Thinned[int](4)
    for number in range(100):
        thinned.add(number)
    assert thinned.all() == [0, 16, 32, 48, 64, 80, 96, 99]
    few = Thinned[int](4)
    for number in range(7):
        few.add(number)
    assert few.all() == list(range(7))


def test_spans_are_bounded_and_their_overlap_is_that_of_all() -> None:
    spans, every = Spans(most=100), work(2_000)
    for span in every:
        spans.add(span)
        assert len(spans.all()) <= 300
    found, expected = spans.overlap(), overlap(every)
    assert abs(found.generating_s - 12_000) < 1e-6
    assert abs(found.training_s - 10_000) < 1e-6
    assert abs(found.both_s - 4_000) < 1e-6
    assert (expected.generating_s, expected.training_s, expected.both_s) == (12_000, 10_000, 4_000)


def test_the_newest_spans_are_as_they_were_and_older_ones_last_as_long_together() -> None:
    spans, every = Spans(most=100), work(2_000)
    for span in every:
        spans.add(span)
    assert spans.all()[-100:] == every[-100:]
    for kind, seconds in (("generate", 12_000.0), ("train", 10_000.0)):
        lasted = sum(span.end - span.start for span in spans.all() if span.kind == kind)
        assert abs(lasted - seconds) < 1e-6


def test_overlapping_spans_of_a_lane_count_once_when_they_are_joined() -> None:
    chance = random.Random(5)
    spans = [Span("env", "reset", at, at + 3.0) for at in sorted(chance.uniform(0, 100) for _ in range(500))]
    (joined, *rest) = coarser(spans, most=1)
    assert rest == []
    assert joined.start == spans[0].start
    covered = [False] * 103_000  # by the millisecond
    for span in spans:
        for millisecond in range(round(span.start * 1000), round(span.end * 1000)):
            covered[millisecond] = True
    assert abs(joined.end - joined.start - sum(covered) / 1000) < 0.2


def test_a_long_run_is_thinned_and_summed_whole(tmp_path: Path) -> None:
    count = 3 * MOST_STEPS
    with RunDirectory.create(tmp_path, "long") as run:
        steps = LineWriter(run.metrics)
        steps.write_all(step(number, trajectories=32, tokens=1_000) for number in range(1, count + 1))
        steps.close()
        samples = LineWriter(run.sample_index)
        samples.write_all(sample(f"t{number}", reward=float(number % 7)) for number in range(50))
        samples.close()
        history = read_history(run)
    assert len(history.steps) <= 2 * MOST_STEPS + 1
    assert history.steps[-1].step == count
    assert history.trained == 32 * count
    assert history.tokens == 1_000 * count
    assert [one.ticket for one in history.samples] == ["t48", "t49"]  # 48: best (6); 49: worst (0) and latest
