"""Line charts as inline SVG, with their labels as HTML so that these stay legible at any width.

Invariant: a chart is drawn from whatever values there are: a value that is not finite is a gap in the line, and a
series of ten thousand points is drawn as the means of a few hundred buckets over the band of their extremes, so that
no spike is hidden.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from coordinator.observe.page import escaped
from coordinator.observe.text import number

Point = tuple[float, float]
WIDTH, HEIGHT = 1000.0, 100.0
BUCKETS = 200
MANY_DOTS = 80
COLOURS = 7


class Series(msgspec.Struct, frozen=True):
    """One line (or row of dots) of a chart."""

    label: str
    colour: int  # 1 to COLOURS: --c1 to --c7 of the page
    points: Sequence[Point]
    style: Literal["curve", "faint", "dots"] = "curve"
    dashed: bool = False


class Band(msgspec.Struct, frozen=True):
    """An area behind the lines."""

    low: list[Point]
    high: list[Point]
    colour: int = 1
    outlined: bool = False  # so that a spike one bucket wide is seen


class Axis(msgspec.Struct, frozen=True):
    """What the horizontal axis counts."""

    before: str = "v"  # what stands around its value at the pointer: "v12"
    after: str = ""
    whole: bool = True  # no marks between whole numbers
    nearest: bool = False  # the lines share no places: the pointer shows the point of each that is nearest


VERSIONS = Axis()


class Scale(msgspec.Struct, frozen=True):
    """Maps values to 0 ... 1."""

    low: float
    high: float

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5


def chart(
    title: str,
    series: Sequence[Series],
    *,
    band: Band | None = None,
    bounds: tuple[float, float] | None = None,
    text: Callable[[float], str] = number,
    axis: Axis = VERSIONS,
) -> str:
    """A figure with title, legend, axes and curves. ``bounds`` fixes the vertical axis, ``text`` writes its values."""
    drawn, bands = _prepared(series, band)
    if not drawn:
        return (
            f'<figure class="card"><figcaption>{escaped(title)}</figcaption><p class="muted">no values yet</p></figure>'
        )
    shown = [point for one in drawn for point in one.points] + [
        point for area in bands for point in area.low + area.high
    ]
    xs = Scale(min(x for x, _ in shown), max(x for x, _ in shown))
    ys = _vertical([y for _, y in shown if math.isfinite(y)], bounds)
    marks = ticks(ys.low, ys.high, 4)
    parts = [f'<path class="gridline" d="M0 {_y(ys, mark)}H{WIDTH:g}"/>' for mark in marks]
    parts += [_area(area, xs, ys) for area in bands]
    parts += [_drawn(one, xs, ys) for one in drawn]
    labels = [
        *(f'<i class="y" style="bottom:{100 * ys.share(mark):.2f}%">{escaped(text(mark))}</i>' for mark in marks),
        *(
            f'<i class="x" style="left:{100 * xs.share(mark):.2f}%">{mark:g}</i>'
            for mark in ticks(xs.low, xs.high, 6, whole=axis.whole)
        ),
    ]
    return (
        f'<figure class="card"><figcaption>{escaped(title)}{_legend(drawn, text)}</figcaption>'
        f'<div class="plot" data-range="[{xs.low:g},{xs.high:g}]"{_axis(axis)} data-series="{_data(drawn, text)}">'
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" preserveAspectRatio="none" role="img" aria-label="{escaped(title)}">'
        f"{''.join(parts)}</svg>{''.join(labels)}</div></figure>"
    )


def thinned(points: Sequence[Point], buckets: int = BUCKETS) -> tuple[Sequence[Point], Band | None]:
    """Many points as the means of buckets, and the band between the least and the greatest of each; few as they are.
    A bucket with none that is finite is a gap."""
    if len(points) <= 2 * buckets:
        return points, None
    means: list[Point] = []
    band = Band([], [], outlined=True)
    for bucket in range(buckets):
        part = points[len(points) * bucket // buckets : len(points) * (bucket + 1) // buckets]
        x = part[-1][0]
        finite = [y for _, y in part if math.isfinite(y)]
        means.append((x, sum(finite) / len(finite) if finite else math.nan))
        if finite:
            band.low.append((x, min(finite)))
            band.high.append((x, max(finite)))
    return means, band


def ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """At most ``most`` + 1 round values (1, 2 or 5 times a power of ten apart) from ``low`` to ``high``."""
    if not high > low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= most)
    step = max(step, 1.0) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _prepared(series: Sequence[Series], band: Band | None) -> tuple[list[Series], list[Band]]:
    """What has values, thinned."""
    drawn: list[Series] = []
    bands = [Band(list(thinned(band.low)[0]), list(thinned(band.high)[0]), band.colour)] if band else []
    for one in series:
        points, extremes = (one.points, None) if one.style == "dots" else thinned(one.points)
        if any(math.isfinite(y) for _, y in points):
            drawn.append(msgspec.structs.replace(one, points=points))
            bands += [msgspec.structs.replace(extremes, colour=one.colour)] if extremes else []
    return drawn, bands


def _vertical(values: Sequence[float], bounds: tuple[float, float] | None) -> Scale:
    low, high = min(values), max(values)
    if bounds:
        return Scale(min(low, bounds[0]), max(high, bounds[1]))
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    near_zero = 0 <= low <= 0.3 * (high - low)
    return Scale(0.0 if near_zero else low - margin, high + margin)


def _drawn(series: Series, xs: Scale, ys: Scale) -> str:
    curve = {"curve": "curve", "faint": "curve faint", "dots": "dots"}[series.style]
    if series.dashed:
        curve += " dashed"
    runs = list(_runs(series.points))
    if series.style == "dots" or all(len(run) == 1 for run in runs):
        curve = "dots many" if len(series.points) > MANY_DOTS else "dots"
        path = "".join(f"M{_x(xs, x)} {_y(ys, y)}h0" for run in runs for x, y in run)
    else:  # a lone point between gaps gets a short stroke, so that it is seen
        path = "".join(
            f"M{'L'.join(f'{_x(xs, x)} {_y(ys, y)}' for x, y in run)}{'h0' * (len(run) == 1)}" for run in runs
        )
    return f'<path class="{curve}" style="--c:var(--c{series.colour})" d="{path}"/>'


def _runs(points: Iterable[Point]) -> Iterable[list[Point]]:
    run: list[Point] = []
    for point in points:
        if math.isfinite(point[1]):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _area(band: Band, xs: Scale, ys: Scale) -> str:
    outline = [point for point in (*band.low, *reversed(band.high)) if math.isfinite(point[1])]
    path = f"M{'L'.join(f'{_x(xs, x)} {_y(ys, y)}' for x, y in outline)}Z" if outline else ""
    kind = "band outlined" if band.outlined else "band"
    return f'<path class="{kind}" style="--c:var(--c{band.colour})" d="{path}"/>'


def _x(xs: Scale, value: float) -> str:
    return f"{WIDTH * xs.share(value):.1f}"


def _y(ys: Scale, value: float) -> str:
    return f"{HEIGHT * (1 - ys.share(value)):.2f}"


def _legend(series: Sequence[Series], text: Callable[[float], str]) -> str:
    return "".join(
        f"<small{_key(one.colour) if one.label else ''}>{escaped(f'{one.label} {text(_last(one.points))}')}</small>"
        for one in series
    )


def _key(colour: int) -> str:
    return f' class="key" style="--c:var(--c{colour})"'


def _axis(axis: Axis) -> str:
    """For the page's script, where it is another than versions."""
    if axis == VERSIONS:
        return ""
    around = f' data-before="{escaped(axis.before)}" data-after="{escaped(axis.after)}"'
    return around + (" data-nearest" if axis.nearest else "")


def _last(points: Sequence[Point]) -> float:
    return next((y for _, y in reversed(points) if math.isfinite(y)), math.nan)


def _data(series: Sequence[Series], text: Callable[[float], str]) -> str:
    tree = [{"label": one.label, "points": [(x, text(y)) for x, y in one.points]} for one in series]
    return html.escape(json.dumps(tree, separators=(",", ":")), quote=True)
