"""What a run directory tells of its run, read in one go.

Invariant: memory is bounded however long the run was: of very many steps evenly spread ones are kept (and what they add
up to), of the spans of work the newest as they are and older ones ever coarser, of the trajectories the three that are
shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from actors.telemetry import Span
from coordinator.observe.lines import each_line
from coordinator.observe.overlap import Overlap, overlap
from coordinator.observe.records import (
    EvalRecord,
    ImitationRecord,
    SampleRecord,
    StepRecord,
    decode_metric,
    decode_sample,
)
from coordinator.observe.rundir import RunDirectory
from coordinator.scheduling.journal import Losses, read_losses

T = TypeVar("T")

MOST_STEPS = 1_000
"""More than a chart has pixels; twice as many are kept for a while."""

MOST_SPANS = 10_000
"""Of the newest, and as many older ones."""

COLUMNS = 2_000
"""Older spans are joined within this part of the time that they cover, finer than it is drawn."""


class History(msgspec.Struct, frozen=True):
    """All that a report shows."""

    name: str
    job: dict[str, Any]
    steps: list[StepRecord]
    trained: int  # trajectories
    tokens: int  # trained on
    evaluations: list[EvalRecord]
    spans: list[Span]
    overlap: Overlap
    samples: list[SampleRecord]
    losses: Losses = Losses({}, {})
    imitation: list[ImitationRecord] = []
    unreadable: int = 0  # lines


class Thinned(Generic[T]):
    """Evenly spread ones of any number, always with the newest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._every = 1
        self._kept: list[T] = []
        self._seen = 0
        self._newest: list[T] = []

    def add(self, item: T) -> None:
        if self._seen % self._every == 0:
            self._kept.append(item)
            self._newest = []
        else:
            self._newest = [item]
        self._seen += 1
        if len(self._kept) == 2 * self._most:
            self._newest = self._kept[-1:]
            self._kept = self._kept[::2]
            self._every *= 2

    def all(self) -> list[T]:
        return self._kept + self._newest


class Spans:
    """See the module docstring. How long one kind of work went on beside another is added up before spans are
    joined."""

    def __init__(self, most: int = MOST_SPANS) -> None:
        self._most = most
        self._older: list[Span] = []
        self._newest: list[Span] = []
        self._until = float("-inf")  # up to here the overlap is added up
        self._overlap = Overlap(0.0, 0.0, 0.0)

    def add(self, span: Span) -> None:
        self._newest.append(span)
        if len(self._newest) >= 2 * self._most:
            self._age()

    def all(self) -> list[Span]:
        return self._older + self._newest

    def overlap(self) -> Overlap:
        return _sum(self._overlap, overlap(_within(self._newest, self._until, float("inf"))))

    def _age(self) -> None:
        """Half of the newest are old now, but for those that go on beside the others."""
        self._newest.sort(key=lambda span: span.start)
        until = self._newest[self._most].start
        self._overlap = _sum(self._overlap, overlap(_within(self._newest, self._until, until)))
        self._until = until
        self._older = coarser(self._older + [span for span in self._newest if span.end <= until], self._most)
        self._newest = [span for span in self._newest if span.end > until]


def coarser(spans: list[Span], most: int) -> list[Span]:
    """At most so many: those of a lane and a kind that begin close to each other become one of their length together,
    from the first one's start on."""
    if not spans:
        return spans
    spans = sorted(spans, key=lambda span: span.start)
    width_s = (spans[-1].start - spans[0].start) / COLUMNS
    while True:
        joined = _joined(spans, width_s)
        if len(joined) <= most or width_s > spans[-1].start - spans[0].start:
            return joined[-most:]
        width_s *= 2


def _joined(spans: list[Span], width_s: float) -> list[Span]:
    found: list[Span] = []
    place: dict[tuple[str, str], int] = {}
    reach: dict[tuple[str, str], float] = {}
    for span in spans:
        which = span.lane, span.kind
        index = place.get(which)
        if index is None or span.start - found[index].start >= width_s:
            place[which], reach[which] = len(found), span.end
            found.append(span)
        else:
            more_s = max(0.0, span.end - max(span.start, reach[which]))
            reach[which] = max(reach[which], span.end)
            found[index] = msgspec.structs.replace(found[index], end=found[index].end + more_s)
    return found


def _within(spans: list[Span], start: float, end: float) -> list[Span]:
    return [
        msgspec.structs.replace(span, start=max(span.start, start), end=min(span.end, end))
        for span in spans
        if span.end > start and span.start < end
    ]


def _sum(one: Overlap, other: Overlap) -> Overlap:
    return Overlap(one.generating_s + other.generating_s, one.training_s + other.training_s, one.both_s + other.both_s)


def read_history(run: RunDirectory) -> History:
    """Everything there is, however little."""
    steps, imitation = Thinned[StepRecord](MOST_STEPS), Thinned[ImitationRecord](MOST_STEPS)
    evaluations: list[EvalRecord] = []
    trained = tokens = 0
    bad = itertools.count()
    for record in each_line(run.metrics, decode_metric, lambda: next(bad)):
        if isinstance(record, StepRecord):
            steps.add(record)
            trained, tokens = trained + record.trajectories, tokens + record.tokens
        elif isinstance(record, EvalRecord):
            evaluations.append(record)
        else:
            imitation.add(record)
    spans = Spans()
    for span in each_line(run.timeline, msgspec.json.Decoder(Span).decode, lambda: next(bad)):
        spans.add(span)
    return History(
        name=run.path.name,
        job=run.read_job(),
        steps=steps.all(),
        trained=trained,
        tokens=tokens,
        evaluations=evaluations,
        spans=spans.all(),
        overlap=spans.overlap(),
        samples=_shown(run, bad),
        losses=read_losses(run.ledger),
        imitation=imitation.all(),
        unreadable=next(bad),
    )


def _shown(run: RunDirectory, bad: Iterator[int]) -> list[SampleRecord]:
    """The best, the worst and the latest trajectory, of equal ones the newest, in the order in which they came."""
    chosen: dict[str, tuple[int, SampleRecord]] = {}
    for place, sample in enumerate(each_line(run.sample_index, decode_sample, lambda: next(bad))):
        chosen["latest"] = place, sample
        if "best" not in chosen or sample.reward >= chosen["best"][1].reward:
            chosen["best"] = place, sample
        if "worst" not in chosen or sample.reward <= chosen["worst"][1].reward:
            chosen["worst"] = place, sample
    return [sample for _, sample in sorted(dict(chosen.values()).items())]
