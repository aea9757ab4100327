"""Folded stacks as a flame graph: one SVG file that needs nothing else.

Invariant: a frame's width is its share of the whole weight; frames too narrow to see are left out, never widened, and
their parents keep their width. Without a script the file is complete (every frame has its name and figures as a title);
with one, a click enlarges a frame and "search" marks what matches. Names are text, whatever they hold.

After Brendan Gregg, "The Flame Graph" (ACM Queue 14(2), 2016): the outermost frame at the bottom, the order within a
level alphabetical, so that equal stacks are neighbours; colours carry no meaning.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from html import escape

import msgspec

WIDTH, ROW, MARGIN, HEAD = 1200.0, 17, 10.0, 58
LEAST = 0.3  # px: narrower frames are left out
LETTER = 6.6  # px, of the font below
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")  # not allowed in XML, even escaped


class Node(msgspec.Struct):
    """A frame reached by one path."""

    name: str
    weight: int = 0
    children: dict[str, Node] = {}


class Box(msgspec.Struct, frozen=True):
    """A frame's place: from ``left`` on, ``width`` wide (both shares of the whole), at a depth."""

    node: Node
    left: float
    width: float
    depth: int


def tree(stacks: Mapping[str, int], name: str = "all") -> Node:
    """Every frame's weight is that of the stacks that go through it."""
    root = Node(name)
    for stack, weight in stacks.items():
        node = root
        node.weight += weight
        for frame in stack.split(";"):
            node = node.children.setdefault(frame, Node(frame))
            node.weight += weight
    return root


def boxes(root: Node, least: float = 0.0) -> Iterator[Box]:
    """Outer frames before inner ones."""
    waiting = [Box(root, 0.0, 1.0, 0)]
    while waiting:
        box = waiting.pop()
        if box.width < least:
            continue
        yield box
        left = box.left
        for _, child in sorted(box.node.children.items()):
            width = child.weight / root.weight
            waiting.append(Box(child, left, width, box.depth + 1))
            left += width


def flame_graph(stacks: Mapping[str, int], title: str, unit: str) -> str:
    """The SVG. ``unit``: of the weights; ``us`` is shown as milliseconds."""
    root = tree(stacks)
    placed = list(boxes(root, LEAST / (WIDTH - 2 * MARGIN))) if root.weight else []
    height = HEAD + ROW * (1 + max((box.depth for box in placed), default=0)) + 34
    frames = "\n".join(_frame(box, root.weight, unit, height) for box in placed)
    empty = "" if placed else f'<text x="{MARGIN}" y="{HEAD}">nothing was recorded</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height}" width="{WIDTH:g}" '
        f'height="{height}" font-family="monospace" font-size="11">\n<style>{_STYLE}</style>\n'
        f'<rect width="100%" height="100%" fill="#fafafa"/>\n'
        f'<text x="{WIDTH / 2:g}" y="24" text-anchor="middle" font-size="15">{_text(title)}</text>\n'
        f'<text id="reset" x="{MARGIN:g}" y="24" class="order" visibility="hidden">reset</text>\n'
        f'<text id="search" x="{WIDTH - MARGIN:g}" y="24" text-anchor="end" class="order">search</text>\n'
        f'<text id="found" x="{WIDTH - MARGIN:g}" y="{height - 10}" text-anchor="end"> </text>\n'
        f'<g id="frames">\n{frames}\n</g>\n{empty}<script><![CDATA[{_SCRIPT}]]></script>\n</svg>\n'
    )


def _frame(box: Box, total: int, unit: str, height: int) -> str:
    inner = WIDTH - 2 * MARGIN
    x, width = MARGIN + box.left * inner, box.width * inner
    y = height - 34 - ROW * (box.depth + 1)
    name = box.node.name
    return (
        f'<g data-x="{box.left:.6f}" data-w="{box.width:.6f}" data-d="{box.depth}" data-n="{_text(name)}">'
        f"<title>{_text(name)} ({_weight(box.node.weight, unit)}, {100 * box.node.weight / total:.2f}%)</title>"
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW - 1}" rx="2" fill="{_colour(name)}"/>'
        f'<text x="{x + 3:.2f}" y="{y + 12}">{_text(_fitting(name, width))}</text></g>'
    )


def _weight(weight: int, unit: str) -> str:
    return f"{weight / 1000:,.1f} ms" if unit == "us" else f"{weight:,} {unit}"


def _fitting(name: str, width: float) -> str:
    """As much of a name as there is room for."""
    letters = int((width - 6) / LETTER)
    if len(name) <= letters:
        return name
    return name[: letters - 2] + ".." if letters >= 3 else ""


def _colour(name: str) -> str:
    """The same name has the same colour in every graph."""
    mark = zlib.crc32(name.encode(errors="replace"))
    return f"rgb({205 + mark % 50},{90 + mark // 50 % 110},{mark // 5500 % 55})"


def _text(text: str) -> str:
    return escape(_FORBIDDEN.sub("?", text))


_STYLE = """
g rect { stroke: #fafafa; stroke-width: 0.5; } #frames g { cursor: pointer; } #frames g:hover rect { stroke: #000; }
text { pointer-events: none; fill: #111; } .order { pointer-events: auto; cursor: pointer; fill: #2b6cb0; }
.found rect { fill: #c026d3; } .dim { opacity: 0.35; }
"""

_SCRIPT = r"""
(function () {
  var inner = 1180, margin = 10, letter = 6.6, all = Array.prototype.slice.call(document.querySelectorAll("#frames g"));
  var reset = document.getElementById("reset"), found = document.getElementById("found");
  function num(g, key) { return parseFloat(g.getAttribute("data-" + key)); }
  function fit(name, width) {
    var letters = Math.floor((width - 6) / letter);
    return name.length <= letters ? name : letters >= 3 ? name.slice(0, letters - 2) + ".." : "";
  }
  function zoom(at) {
    var left = num(at, "x"), share = num(at, "w"), depth = num(at, "d"), tiny = 1e-5;
    all.forEach(function (g) {
      var x = num(g, "x"), w = num(g, "w");
      var outer = num(g, "d") < depth && x <= left + tiny && x + w >= left + share - tiny;
      var inside = outer || (num(g, "d") >= depth && x >= left - tiny && x + w <= left + share + tiny);
      g.style.display = inside ? "" : "none";
      g.setAttribute("class", (g.getAttribute("class") || "").replace("dim", "") + (outer ? " dim" : ""));
      var from = outer ? margin : margin + (x - left) / share * inner, width = outer ? inner : w / share * inner;
      var rect = g.querySelector("rect"), text = g.querySelector("text");
      rect.setAttribute("x", from); rect.setAttribute("width", Math.max(0, width));
      text.setAttribute("x", from + 3); text.textContent = fit(g.getAttribute("data-n"), width);
    });
    reset.setAttribute("visibility", share < 1 ? "visible" : "hidden");
  }
  function search(wanted) {
    var pattern = wanted ? new RegExp(wanted, "i") : null, spans = [];
    all.forEach(function (g) {
      var hit = pattern && pattern.test(g.getAttribute("data-n"));
      g.classList[hit ? "add" : "remove"]("found");
      if (hit) spans.push([num(g, "x"), num(g, "x") + num(g, "w")]);
    });
    spans.sort(function (a, b) { return a[0] - b[0]; });
    var end = 0, sum = 0;
    spans.forEach(function (s) { if (s[1] > end) { sum += s[1] - Math.max(end, s[0]); end = s[1]; } });
    found.textContent = wanted ? "matched: " + (100 * sum).toFixed(1) + "%" : " ";
  }
  all.forEach(function (g) { g.addEventListener("click", function () { zoom(g); }); });
  reset.addEventListener("click", function () { zoom(all[0]); });
  document.getElementById("search").addEventListener("click", function () {
    var wanted = prompt("Search frames (a regular expression):", "");
    if (wanted !== null) { try { search(wanted); } catch (error) { found.textContent = String(error.message); } }
  });
})();
"""
