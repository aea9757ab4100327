"""Spans: small pieces of continuing work become one, and nothing grows while nobody takes them."""

from __future__ import annotations

import asyncio

import pytest

from actors.core import Actor, Node, handler
from actors.telemetry import KEPT, MERGE_GAP_S, MERGE_LENGTH_S, Span, Spans, SpansTaken, report_spans
from tests.support.loops import run, until


def test_a_span_is_kept_as_it_was_told() -> None:
    spans = Spans("engine-0")
    spans.add("swap", 10.0, 10.5, version=3, detail="x")
    assert spans.take() == [Span("engine-0", "swap", 10.0, 10.5, 3, "x")]
    assert spans.take() == []


def test_pieces_with_small_gaps_between_them_are_one_span() -> None:
    spans = Spans("e")
    spans.busy("generate", 0.0, 0.1)
    spans.busy("generate", 0.1 + MERGE_GAP_S / 2, 0.2)
    spans.busy("generate", 0.2 + MERGE_GAP_S * 2, 0.4)
    assert [(span.start, span.end) for span in spans.take()] == [(0.0, 0.2), (0.2 + MERGE_GAP_S * 2, 0.4)]


def test_a_span_of_merged_pieces_has_a_bounded_length() -> None:
    spans = Spans("e")
    for piece in range(40):
        spans.busy("generate", piece / 16, (piece + 1) / 16)  # 2.5 s without a gap
    assert [(span.start, span.end) for span in spans.take()] == [(0.0, 1.0), (1.0, 2.0), (2.0, 2.5)]
    assert MERGE_LENGTH_S == 1.0


def test_kinds_of_work_are_not_merged_with_each_other() -> None:
    spans = Spans("e")
    spans.busy("prefill", 0.0, 0.1)
    spans.busy("decode", 0.1, 0.2)
    assert sorted((span.kind, span.start) for span in spans.take()) == [("decode", 0.1), ("prefill", 0.0)]


def test_only_the_newest_are_kept_while_nobody_takes_them() -> None:
    spans = Spans("e")
    for number in range(KEPT + 5):
        spans.add("step", number, number + 1)
    kept = spans.take()
    assert len(kept) == KEPT
    assert kept[0].start == 5


class Telemetry(Actor):
    def __init__(self) -> None:
        self.spans: list[Span] = []

    @handler
    async def take(self, message: SpansTaken) -> None:
        self.spans += message.spans


def test_what_the_lanes_gather_is_sent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.telemetry.REPORT_EVERY_S", 0.01)

    async def test() -> list[str]:
        async with Node("n") as node:
            telemetry = Telemetry()
            ref = await node.spawn(lambda: telemetry, "coordinator")
            lanes = [Spans("a"), Spans("b")]
            reporting = asyncio.create_task(report_spans(node, ref, *lanes))
            for lane in lanes:
                lane.add("x", 0.0, 1.0)
            await until(lambda: len(telemetry.spans) == 2)
            reporting.cancel()
            return [span.lane for span in telemetry.spans]

    assert run(test()) == ["a", "b"]


def test_without_anybody_to_tell_reporting_ends_at_once() -> None:
    async def test() -> None:
        async with Node("n") as node:
            await report_spans(node, None, Spans("a"))

    run(test())
