"""Several runs on one page and in a few lines of text: overlaid curves, outcomes and settings that differ.

Invariant: a run has the same letter and the same colour everywhere on the page; the page loads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coordinator.observe.charts import COLOURS, Axis, Series, chart
from coordinator.observe.comparison import BETTER, ComparedRun, Outcome, Reading, best_of, curves, differences, outcome
from coordinator.observe.page import Cell, escaped, folded, page, table
from coordinator.observe.text import count, duration, number, percent, readable, whole

Text = Callable[[Any], str]


def _version(value: int | None) -> str:
    return "-" if value is None else f"v{value}"


FIGURES: dict[str, tuple[str, Text]] = {
    "steps": ("steps", str),
    "seconds": ("time", duration),
    "seconds_per_step": ("seconds a step", number),
    "success_last": ("success, last evaluation", percent),
    "success_best": ("success, best evaluation", percent),
    "success_best_version": ("reached at version", _version),
    "success_training": ("success, training", percent),
    "reward_trend": ("reward, trend", number),
    "loss": ("loss, last", lambda value: number(value, 4)),
    "entropy": ("entropy, last", lambda value: number(value, 3)),
    "held_out_loss_last": ("held-out loss, last", lambda value: number(value, 4)),
    "held_out_loss_best": ("held-out loss, best", lambda value: number(value, 4)),
    "tokens_per_s": ("tokens/s", whole),
    "trajectories": ("trajectories trained", count),
    "tokens": ("tokens trained", count),
    "lost": ("trajectories lost", count),
}
"""Field of ``Outcome`` -> what people call it, and how it reads."""

TEXT_OF = {"Success, evaluation": percent, "Success, training": percent, "Tokens/s sampled": whole}
WHOLE_RANGE = {"Success, evaluation": (0.0, 1.0), "Success, training": (0.0, 1.0)}
FIRST = ("Success, evaluation", "Reward, trend")
"""Curves that are drawn large."""

MOST_SETTINGS = 12
"""Differing settings that the terminal shows."""

MOST_TEXT = 28
"""Of a setting's value, on the terminal."""


# ---- the page -------------------------------------------------------------------------------------------------------


def comparison_page(runs: Sequence[ComparedRun]) -> bytes:
    """The comparison as HTML."""
    all_curves = [curves(run) for run in runs]
    times = [reading.elapsed_s for each in all_curves for curve in each.values() for reading in curve]
    divisor, unit = time_unit(max(filter(math.isfinite, times), default=0.0))
    by_step = Axis("v", "")
    by_time = Axis("", f" {unit}", whole=False, nearest=True)
    sections = [
        f"<h1>{len(runs)} runs compared</h1>{_legend(runs)}",
        "<h2>Outcome</h2>" + _outcomes(runs),
        "<h2>Settings that differ</h2>" + _settings(runs),
        "<h2>By step <small>version of the weights</small></h2>"
        + _charts(all_curves, runs, by_step, lambda reading: float(reading.version)),
        f"<h2>By wall time <small>{unit} since the run started, in all its sittings</small></h2>"
        + _charts(all_curves, runs, by_time, lambda reading: reading.elapsed_s / divisor),
    ]
    names = ", ".join(run.name for run in runs)
    return page(f"compared: {names}", "\n".join(sections))


def time_unit(longest_s: float) -> tuple[float, str]:
    """Seconds in a unit that keeps the axis short, and its name."""
    if not longest_s >= 300:
        return 1.0, "s"
    return (60.0, "min") if longest_s < 3 * 3600 else (3600.0, "h")


def colour(index: int) -> int:
    """The page's colour for the run at this place."""
    return 1 + index % COLOURS


def _legend(runs: Sequence[ComparedRun]) -> str:
    entries = []
    for index, run in enumerate(runs):
        notes = [str(run.path)]
        if not (run.steps or run.imitation):
            notes.append("no step yet")
        if run.unreadable:
            notes.append(f"{run.unreadable} lines could not be read and are left out")
        dashed = " dashed" if index >= COLOURS else ""
        entries.append(
            f'<li class="key{dashed}" style="--c:var(--c{colour(index)})"><b>{escaped(run.label)}</b> '
            f'{escaped(run.name)}<small class="muted"> {escaped(" · ".join(notes))}</small></li>'
        )
    return f'<ul class="runs card">{"".join(entries)}</ul>'


def _charts(
    all_curves: Sequence[Mapping[str, Sequence[Reading]]],
    runs: Sequence[ComparedRun],
    axis: Axis,
    place: Callable[[Reading], float],
) -> str:
    titles = list(dict.fromkeys(title for each in all_curves for title in each))
    drawn = {title: _chart(title, all_curves, runs, axis, place) for title in titles}
    if not drawn:
        return '<div class="card"><p class="muted">no steps yet</p></div>'
    large = "".join(text for title, text in drawn.items() if title in FIRST)
    small = "".join(text for title, text in drawn.items() if title not in FIRST)
    return (f'<div class="grid wide">{large}</div><br>' if large else "") + f'<div class="grid">{small}</div>'


def _chart(
    title: str,
    all_curves: Sequence[Mapping[str, Sequence[Reading]]],
    runs: Sequence[ComparedRun],
    axis: Axis,
    place: Callable[[Reading], float],
) -> str:
    series = [
        Series(
            run.label,
            colour(index),
            [(place(reading), reading.value) for reading in each.get(title, []) if math.isfinite(place(reading))],
            dashed=index >= COLOURS,
        )
        for index, (run, each) in enumerate(zip(runs, all_curves, strict=True))
    ]
    return chart(title, series, bounds=WHOLE_RANGE.get(title), text=TEXT_OF.get(title, number), axis=axis)


def _outcomes(runs: Sequence[ComparedRun]) -> str:
    outcomes = [outcome(run) for run in runs]
    rows: list[tuple[str, list[Cell]]] = []
    for field, (label, text) in FIGURES.items():
        values = [getattr(each, field) for each in outcomes]
        if all(text(value) == "-" for value in values):
            continue
        best = best_of(field, outcomes)
        marked: list[Cell] = [(text(value), "best" if value == best else "") for value in values]
        rows.append(("", [label, *marked]))
    shown = table(["", *(run.label for run in runs)], rows)
    return shown + '<p class="muted">The best of a row is green where one end is better whatever the job.</p>'


def _settings(runs: Sequence[ComparedRun]) -> str:
    differing, shared = differences([run.job for run in runs])
    head = ["", *(run.label for run in runs)]
    shown = (
        table(head, [("", [key, *values]) for key, values in differing.items()])
        if differing
        else '<div class="card"><p class="muted">none</p></div>'
    )
    rows = table(["", "all runs"], [("", [key, value]) for key, value in shared.items()])
    return shown + folded(f"{len(shared)} settings are the same in all", rows)


# ---- the terminal ---------------------------------------------------------------------------------------------------

COLUMNS = {
    "steps": "steps",
    "success_last": "success",
    "success_best": "best",
    "reward_trend": "reward",
    "loss": "loss",
    "held_out_loss_last": "held-out",
    "seconds_per_step": "s/step",
    "seconds": "time",
    "tokens_per_s": "tok/s",
    "lost": "lost",
}


def comparison_text(runs: Sequence[ComparedRun]) -> str:
    """A line a run, then the settings that differ."""
    outcomes = [outcome(run) for run in runs]
    cells = {field: [FIGURES[field][1](getattr(each, field)) for each in outcomes] for field in COLUMNS}
    fields = [field for field, texts in cells.items() if any(text != "-" for text in texts)]
    head = ["run", "", *(COLUMNS[field] for field in fields)]
    rows = [
        [run.label, readable(run.name), *(_marked(field, cells[field][index], outcomes, index) for field in fields)]
        for index, run in enumerate(runs)
    ]
    differing, shared = differences([run.job for run in runs])
    lines = _aligned([head, *rows], left=2)
    if not differing:
        return "\n".join([*lines, "", f"all {len(shared)} settings are the same"])
    shown = [[key, *map(_short, values)] for key, values in list(differing.items())[:MOST_SETTINGS]]
    lines += ["", *_aligned([["settings that differ", *(run.label for run in runs)], *shown], left=1)]
    if len(differing) > MOST_SETTINGS:
        lines.append(f"and {len(differing) - MOST_SETTINGS} more")
    return "\n".join(lines)


def _short(value: str) -> str:
    """The page has all of it."""
    text = readable(value)
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 1] + "…"


def _marked(field: str, text: str, outcomes: Sequence[Outcome], index: int) -> str:
    """A star at the best of a column."""
    if field not in BETTER:
        return text
    return text + ("*" if getattr(outcomes[index], field) == best_of(field, outcomes) else " ")


def _aligned(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Columns, the first ``left`` of them to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
