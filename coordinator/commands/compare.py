"""``bin/compare RUN RUN ...``: what came of several runs, and what was different about them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from coordinator.commands.usage import examples
from coordinator.observe.comparison import ComparedRun, ComparisonError, differences, outcome, read_runs
from coordinator.observe.comparison_page import comparison_page, comparison_text
from coordinator.observe.lines import replace_file
from coordinator.observe.rundir import RunDirectoryError


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="compare",
        description="Compare runs, finished or not: a page with their curves laid over each other, by step and by wall "
        "time, their outcomes and the settings that differ; and the same as a short table here.",
        epilog=examples(
            "compare runs/20260131-142501-lake runs/latest",
            "compare runs/2026* --out week.html --json",
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run directories, two or more")
    result.add_argument("--out", type=Path, metavar="FILE", default=Path("comparison.html"), help="where the page goes")
    result.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return result


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        runs = read_runs(arguments.runs)
        _write(arguments.out, comparison_page(runs))
    except (ComparisonError, RunDirectoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    for run in runs:
        if run.unreadable:
            unreadable = f"{run.path / 'metrics.jsonl'}: {run.unreadable} lines could not be read and are left out"
            print(f"warning: {unreadable}", file=sys.stderr)
    print(as_json(runs, arguments.out) if arguments.json else f"{comparison_text(runs)}\n\npage  {arguments.out}")
    return 0


def as_json(runs: Sequence[ComparedRun], out: Path) -> str:
    """One object; figures that a run does not have are null."""
    differing, _ = differences([run.job for run in runs])
    described = [
        {
            "label": run.label,
            "name": run.name,
            "path": str(run.path),
            "unreadable_lines": run.unreadable,
            "lost_by_reason": dict(run.lost),
            "outcome": outcome(run),
        }
        for run in runs
    ]
    return msgspec.json.encode({"page": str(out), "runs": described, "settings_that_differ": differing}).decode()


def _write(out: Path, content: bytes) -> None:
    """Raises ``ComparisonError``."""
    try:
        replace_file(out, content)
    except OSError as error:
        raise ComparisonError(f"--out: {out} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
