"""Line charts as small SVG files, for the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 720, 300, 44
COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b7791f", "#c53030", "#2c7a7b", "#718096", "#97266d", "#4a5568")


def draw(path: Path, series: Mapping[str, Sequence[tuple[float, float]]], x_name: str, y_name: str) -> None:
    """Write one chart; x from 0 to the largest, y from 0 to 1. Series whose names begin alike share a colour."""
    most = max((x for points in series.values() for x, _ in points), default=1.0)
    kinds = list(dict.fromkeys(name.split()[0] for name in series))

    def place(x: float, y: float) -> str:
        across = MARGIN + x / most * (WIDTH - 2 * MARGIN)
        return f"{across:.1f},{HEIGHT - MARGIN - y * (HEIGHT - 2 * MARGIN):.1f}"

    lines = [
        f'<polyline fill="none" stroke="{COLOURS[kinds.index(name.split()[0]) % len(COLOURS)]}" stroke-width="1.5" '
        f'opacity="0.8" points="{" ".join(place(x, y) for x, y in points)}"><title>{escape(name)}</title></polyline>'
        for name, points in series.items()
    ]
    grid = [
        f'<path d="M{MARGIN} {HEIGHT - MARGIN - mark * (HEIGHT - 2 * MARGIN):.1f}H{WIDTH - MARGIN}" stroke="#ccc"/>'
        f'<text x="{MARGIN - 6}" y="{HEIGHT - MARGIN - mark * (HEIGHT - 2 * MARGIN) + 4:.1f}" text-anchor="end">'
        f"{mark:g}</text>"
        for mark in (0.0, 0.5, 1.0)
    ]
    marks = [
        f'<text x="{MARGIN + share * (WIDTH - 2 * MARGIN):.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">'
        f"{share * most:.0f}</text>"
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    legend = [
        f'<text x="{MARGIN + 90 * index}" y="22" fill="{COLOURS[index % len(COLOURS)]}">{escape(kind)}</text>'
        for index, kind in enumerate(kinds)
    ]
    names = (
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_name)}</text>'
        f'<text x="{WIDTH - MARGIN}" y="22" text-anchor="end">{escape(y_name)}</text>'
    )
    body = "\n".join([*grid, *marks, *lines, *legend, names])
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
