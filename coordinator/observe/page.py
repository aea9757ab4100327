"""The frame of a report: one HTML file that loads nothing, reads well in light and dark, wide and narrow.

Invariant: text from outside reaches the page only through ``escaped``; and were one place to forget it, the page's
content policy still lets no script but the one below run, and nothing load.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence

from coordinator.observe.style import SCRIPT, STYLE
from coordinator.observe.text import readable


def page(title: str, body: str) -> bytes:
    """A whole HTML document."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>\n{body}\n</main><script>{SCRIPT}</script></body></html>\n"
    )
    return text.encode("utf-8", "replace")


def escaped(text: str) -> str:
    """Text that a browser shows as it is, in content and in quoted attributes."""
    return html.escape(readable(text), quote=True)


def tiles(values: Iterable[tuple[str, str]]) -> str:
    """Large figures with a small label each."""
    cells = (f'<div class="tile"><b>{escaped(value)}</b><span>{escaped(label)}</span></div>' for label, value in values)
    return f'<div class="tiles">{"".join(cells)}</div>'


Cell = str | tuple[str, str]
"""Text, or (text, class)."""


def table(head: Sequence[str], rows: Iterable[tuple[str, Sequence[Cell]]]) -> str:
    """Rows are (class, cells); it scrolls sideways by itself where it is too wide."""
    top = "".join(f"<th>{escaped(cell)}</th>" for cell in head)
    lines = (f'<tr class="{escaped(kind)}">{"".join(map(_cell, cells))}</tr>' for kind, cells in rows)
    return f'<div class="card scroll"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _cell(cell: Cell) -> str:
    text, kind = (cell, "") if isinstance(cell, str) else cell
    return f'<td class="{escaped(kind)}">{escaped(text)}</td>' if kind else f"<td>{escaped(text)}</td>"


def folded(summary: str, body: str, *, unfolded: bool = False) -> str:
    """A card that opens with a click; ``summary`` is text, ``body`` is HTML."""
    return f'<details class="card"{" open" if unfolded else ""}><summary>{escaped(summary)}</summary>{body}</details>'
