"""``bin/trace TOOL (--pid N ... | --run DIR)``: where the time of processes goes. ``bin/trace check``: what works here.

Invariant: exit status 0 with a report, also one cut short by Ctrl-C; 1 where nothing works here, 2 for a wrong order.
Diagnostics go to standard error, so that ``--json`` is one JSON object on standard output.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

import msgspec

from hwprobe import live
from hwprobe.tracing.children import Interruption
from hwprobe.tracing.flamegraph import flame_graph
from hwprobe.tracing.folded import to_text
from hwprobe.tracing.kernel import Kernel, look, offers
from hwprobe.tracing.order import Order, Site
from hwprobe.tracing.report import ABOUT, TOOLS, How, Report
from hwprobe.tracing.targets import NoTarget, Targets, of_run
from hwprobe.tracing.text import render, render_offers
from hwprobe.tracing.tools import NothingWorks, trace


def main(argv: list[str] | None = None) -> int:
    """Trace, print, and return the exit status."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["live"]:
        return live.main(words[1:])
    options = _parser().parse_args(words)
    try:
        kernel = look()
        if options.tool != "check":
            return _trace(options, kernel)
    except KeyboardInterrupt:
        return _fail("interrupted: nothing is told", 130)
    _check(kernel, as_json=options.json)
    return 0


def _trace(options: argparse.Namespace, kernel: Kernel) -> int:
    try:
        roots = [*options.pid, *([of_run(options.run)] if options.run is not None else [])]
        targets = Targets(roots, children=not options.alone)
    except NoTarget as error:
        return _fail(str(error), 2)
    order = Order(
        tool=options.tool,
        seconds=options.seconds,
        how=options.by,
        rate_hz=options.rate,
        threshold_ms=options.slow,
        children=not options.alone,
    )
    try:
        with Interruption() as interruption:
            report = trace(order, Site(targets=targets, say=_say), kernel, interruption)
    except NothingWorks as error:
        return _fail(str(error), 1)
    try:
        _write(report, options)
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}", 2)
    print(_json(msgspec.to_builtins(report)) if options.json else render(report))
    return 0


def _check(kernel: Kernel, *, as_json: bool) -> None:
    found = offers(kernel)
    if as_json:
        print(_json({"kernel": msgspec.to_builtins(kernel), "offers": msgspec.to_builtins(found)}))
    else:
        print(render_offers(kernel, found))


def _fail(reason: str, status: int) -> int:
    print(f"trace: {reason}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    tools = "\n".join(f"  {tool:<12} {ABOUT[tool]}" for tool in TOOLS)
    parser = argparse.ArgumentParser(
        prog="trace",
        description="Show where the time of processes goes.",
        epilog=f"tools:\n{tools}\n  check        what this kernel and machine offer, tool by tool\n"
        "  live         how busy this host and its GPUs are, a line a second (bin/trace live --help)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tool", choices=(*TOOLS, "check"), metavar="TOOL")
    parser.add_argument("--pid", type=int, action="append", default=[], metavar="N", help="a process; may be repeated")
    parser.add_argument("--run", type=Path, metavar="DIR", help="the processes of a run on this host")
    parser.add_argument("--alone", action="store_true", help="without the processes that they have started")
    parser.add_argument("--seconds", type=_seconds, default=10.0, metavar="S", help="for how long (10)")
    parser.add_argument("--by", choices=get_args(How), help="this way only (default: the best that works)")
    parser.add_argument("--rate", type=_rate, default=20.0, metavar="HZ", help="looks a second, without BPF (20)")
    parser.add_argument("--slow", type=_seconds, default=10.0, metavar="MS", help="which calls are slow (10)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a flame graph")
    parser.add_argument("--folded", type=Path, metavar="FILE", help="write the folded stacks")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _seconds(text: str) -> float:
    return _within(text, 0.1, 86_400)


def _rate(text: str) -> float:
    return _within(text, 0.1, 1_000)


def _within(text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, found {text!r}") from None
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"expected {least:g} to {most:g}, found {value:g}")
    return value


def _say(line: str) -> None:
    print(f"trace: {line}; Ctrl-C ends it and tells what was gathered", file=sys.stderr, flush=True)


def _write(report: Report, options: argparse.Namespace) -> None:
    if options.svg is not None:
        title = f"{report.tool}: {ABOUT[report.tool]} ({report.seconds:.0f} s, by {report.how})"
        options.svg.write_text(flame_graph(report.folded, title, report.unit))
    if options.folded is not None:
        options.folded.write_text(to_text(report.folded))


def _json(document: object) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


if __name__ == "__main__":
    sys.exit(main())
