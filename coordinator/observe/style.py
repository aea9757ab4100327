"""The look of a report and its one script (values at the pointer); without the script everything is still legible.

Invariant: neither the style nor the script names anything outside the page.
"""

STYLE = """
:root {
  color-scheme: light dark;
  --bg: #f6f7f9; --card: #fff; --ink: #1c2330; --muted: #667085; --line: #e3e6ec; --good: #12876f; --bad: #c4402f;
  --c1: #2f6fd0; --c2: #d9730d; --c3: #12876f; --c4: #8657c9; --c5: #b98a00; --c6: #b0487f; --c7: #7b8494;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #12151b; --card: #1a1f28; --ink: #e4e8ef; --muted: #98a2b3; --line: #2c3340; --good: #45bfa2; --bad: #f07b6c;
    --c1: #6ea4f4; --c2: #f29a4a; --c3: #45bfa2; --c4: #b694f0; --c5: #e0b83f; --c6: #e286b4; --c7: #949dac;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--bg); color: var(--ink);
  font: 14px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif;
}
main { max-width: 1240px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 22px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 32px 0 10px; }
h2 small { font-size: 12px; font-weight: 400; color: var(--muted); margin-left: 6px; }
.badge {
  font-size: 12px; font-weight: 600; vertical-align: 3px; margin-left: 8px; padding: 2px 10px;
  border-radius: 10px; border: 1px solid currentColor; color: var(--c1);
}
.badge.good { color: var(--good); }
.badge.bad { color: var(--bad); }
.muted { margin: 4px 0 0; overflow-wrap: anywhere; }
.muted, figcaption small, .lane-busy { color: var(--muted); }

.grid { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 280px), 1fr)); }
.grid.wide { grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); align-items: start; }
.tiles { display: grid; gap: 8px; grid-template-columns: repeat(auto-fit, minmax(112px, 1fr)); margin-top: 16px; }
.card, .tile {
  background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 12px 14px; margin: 0; min-width: 0;
}
.card + .card { margin-top: 12px; }
.grid > .card + .card { margin-top: 0; }
.tile { padding: 10px 12px; }
.tile b { display: block; font-size: 19px; font-weight: 600; line-height: 1.3; }
.tile span { display: block; color: var(--muted); font-size: 12px; line-height: 1.3; }

figcaption { display: flex; flex-wrap: wrap; gap: 0 14px; align-items: baseline; font-weight: 600; margin-bottom: 8px; }
figcaption small { font-weight: 400; font-size: 12px; }
.key::before {
  content: ""; display: inline-block; width: 10px; height: 10px; border-radius: 3px;
  margin-right: 5px; background: var(--c);
}
.runs { list-style: none; display: grid; gap: 4px; margin-top: 12px; }
.runs b { display: inline-block; min-width: 1.4em; }
.runs li { overflow-wrap: anywhere; }
.key.dashed::before { opacity: .5; }
.plot { position: relative; height: 120px; margin: 4px 6px 22px 46px; }
.wide .plot { height: 200px; }
.plot svg, .bar svg { position: absolute; inset: 0; width: 100%; height: 100%; }
.plot svg { overflow: visible; }
.plot i, .axis i {
  position: absolute; font: 11px/1 system-ui, "DejaVu Sans", sans-serif; color: var(--muted); white-space: nowrap;
}
.plot i.y { right: calc(100% + 6px); transform: translateY(50%); }
.plot i.x { top: calc(100% + 7px); transform: translateX(-50%); }
.gridline, .curve, .dots { fill: none; vector-effect: non-scaling-stroke; }
.gridline { stroke: var(--line); }
.curve { stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
.curve.dashed { stroke-dasharray: 6 4; }
.curve.faint { stroke-width: 1.25; opacity: .5; }
.dots { stroke: var(--c); stroke-width: 8; stroke-linecap: round; }
.dots.many { stroke-width: 4; }
.band { fill: var(--c); opacity: .14; }
.band.outlined { opacity: .26; stroke: var(--c); stroke-width: 1.5; vector-effect: non-scaling-stroke; }
.cursor { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--muted); pointer-events: none; }
.tip {
  position: absolute; z-index: 2; top: 4px; padding: 4px 8px; border-radius: 5px; pointer-events: none;
  background: var(--ink); color: var(--card); font-size: 12px; line-height: 1.45; white-space: pre;
}

.lanes { --name: 96px; --busy: 44px; }
.lane {
  display: grid; grid-template-columns: var(--name) 1fr var(--busy); gap: 8px;
  align-items: center; height: 24px; font-size: 12px;
}
.lane-name { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.lane-busy { text-align: right; }
.bar { position: relative; height: 16px; border-radius: 2px; background: var(--bg); }
.bar rect { fill: var(--c); }
.bar rect:hover { filter: brightness(1.2); }
.cut { stroke: var(--ink); stroke-dasharray: 3 2; vector-effect: non-scaling-stroke; }
.axis { position: relative; height: 16px; margin: 4px calc(var(--busy) + 8px) 2px calc(var(--name) + 8px); }
.axis i { transform: translateX(-50%); }

.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 12px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--muted); font-weight: 500; font-size: 12px; }
th:first-child, td:first-child { text-align: left; padding-left: 2px; }
tr.best td, td.best { font-weight: 600; color: var(--good); }
tr:last-child td { border-bottom: 0; }
.reasons { display: grid; grid-template-columns: max-content 1fr max-content; gap: 6px 12px; align-items: center; }
.reasons div { height: 12px; border-radius: 2px; background: var(--c2); min-width: 2px; }

summary { cursor: pointer; font-weight: 600; }
pre {
  margin: 8px 0 0; font: 12.5px/1.45 ui-monospace, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
.talk { max-height: 460px; overflow: auto; }
.turn { border-left: 3px solid var(--line); padding: 2px 0 2px 10px; margin-top: 10px; }
.turn.action { border-color: var(--c1); }
.turn > span { font-size: 11px; color: var(--muted); }
.turn pre { margin: 2px 0 0; }

@media (max-width: 560px) {
  main { padding: 16px 10px 32px; }
  .card { padding: 10px; }
  .lanes { --name: 76px; --busy: 34px; }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(100px, 1fr)); }
  .tile b { font-size: 17px; }
  th, td { padding: 4px 7px; }
  .axis i:nth-child(even) { visibility: hidden; }
}
@media print {
  body { background: none; }
  .talk { max-height: none; }
}
"""

SCRIPT = """
for (const plot of document.querySelectorAll(".plot[data-series]")) {
  const series = JSON.parse(plot.dataset.series), [low, high] = JSON.parse(plot.dataset.range);
  const cursor = document.createElement("div"), tip = document.createElement("div");
  cursor.className = "cursor";
  tip.className = "tip";
  plot.addEventListener("pointerleave", () => { cursor.remove(); tip.remove(); });
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect();
    const at = low + (event.clientX - box.left) / box.width * (high - low);
    const near = points => points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
    const x = near(series.flatMap(one => one.points))[0], share = high > low ? (x - low) / (high - low) : 0.5;
    const {before = "v", after = "", nearest} = plot.dataset, reach = nearest === undefined ? 0 : (high - low) / 20;
    const rows = series.map(one => [one.label, near(one.points)]).filter(row => Math.abs(row[1][0] - x) <= reach);
    const place = before + (Number.isInteger(x) ? x : +x.toPrecision(4)) + after;
    tip.textContent = [place, ...rows.map(row => (row[0] + " " + row[1][1]).trim())].join("\\n");
    cursor.style.left = 100 * share + "%";
    tip.style.left = share < 0.5 ? `calc(${100 * share}% + 8px)` : "auto";
    tip.style.right = share < 0.5 ? "auto" : `calc(${100 - 100 * share}% + 8px)`;
    plot.append(cursor, tip);
  });
}
"""
