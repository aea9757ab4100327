"""The report's part on imitation: whether the loss falls, also on demonstrations that were held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.observe.charts import Point, Series, chart
from coordinator.observe.page import tiles
from coordinator.observe.records import ImitationRecord
from coordinator.observe.text import count, duration, number, whole


def imitation_section(records: Sequence[ImitationRecord]) -> str:
    """Figures and curves as HTML."""
    steps = [record for record in records if record.step]  # the first may be a measurement only

    def points(value: Callable[[ImitationRecord], float], shown: Sequence[ImitationRecord] = steps) -> list[Point]:
        return [(float(record.version), value(record)) for record in shown]

    charts = [
        chart(
            "Loss, nats a token",
            [
                Series("trained on", 1, points(lambda record: record.loss)),
                Series("held out", 2, points(lambda record: record.held_out_loss, records), "dots"),
            ],
        ),
        chart("Gradient norm", [Series("", 1, points(lambda record: record.grad_norm))]),
        chart("Entropy, nats a token", [Series("", 1, points(lambda record: record.entropy))]),
        chart("Tokens/s", [Series("", 1, points(lambda record: record.tokens_per_s))], text=whole),
    ]
    return tiles(_figures(records)) + f'<div class="grid">{"".join(charts)}</div>'


def _figures(records: Sequence[ImitationRecord]) -> list[tuple[str, str]]:
    last = records[-1]
    measured = [record.held_out_loss for record in records if record.held_out_loss == record.held_out_loss]
    return [
        ("steps", str(last.step)),
        ("epochs", str(last.epoch)),
        ("time", duration(last.elapsed_s)),
        ("loss", number(last.loss, 3)),
        ("held-out loss, first", number(measured[0], 3) if measured else "-"),
        ("held-out loss, last", number(measured[-1], 3) if measured else "-"),
        ("tokens trained", count(sum(record.tokens for record in records))),
    ]
