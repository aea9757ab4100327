"""``bin/plan MIX.yaml|RUN --gpus N | --budget COST``: which hardware classes to take, and how many of each.

What a mix is: ``coordinator.resources.mix``; of a run it is what its trajectories really were. The table has the
recommendation first, then the next best, then what one class alone would do. What is recommended was played on virtual
time beside its rivals; ``--judge`` plays all that is shown, and prints what was counted beside what was expected.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from coordinator.commands.usage import examples
from coordinator.launching.exits import DONE, USAGE
from coordinator.resources.measured import LEFT_OUT, mix_of_run
from coordinator.resources.mix import Mix, MixError, load_mix
from coordinator.resources.planner import Expectation, NoPlan, Recommendation, costs_of, recommend
from coordinator.resources.simulation import Measured, simulate

NEXT = 3
"""Other candidates that are shown."""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="plan",
        description="Recommend a mix of hardware classes for a mix of tasks.",
        epilog=examples(
            "plan examples/mix.yaml --gpus 32",
            "plan examples/mix.yaml --budget 60 --judge",
            "plan runs/latest --gpus 8",
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("mix", type=Path, help="mix of tasks (YAML), or a run directory")
    limit = result.add_mutually_exclusive_group(required=True)
    limit.add_argument("--gpus", type=int, help="how many devices there may be")
    limit.add_argument("--budget", type=float, help="what they may cost, in the currency of classes.NAME.cost")
    result.add_argument("--judge", action="store_true", help="play what is shown on virtual time, too")
    result.add_argument("--games", type=int, default=1000, help="trajectories of such a play (default: 1000)")
    result.add_argument("--json", action="store_true", help="print one JSON object")
    return result


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        mix = mix_of_run(arguments.mix) if arguments.mix.is_dir() else load_mix(arguments.mix)
        plan = recommend(mix, gpus=arguments.gpus, budget=arguments.budget)
    except (MixError, NoPlan) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    if arguments.mix.is_dir() and not any(shape.step_s for shape in mix.tasks.values()):
        print(f"note: {LEFT_OUT}", file=sys.stderr)
    shown = _shown(mix, plan)
    played = _play(mix, shown, arguments.games) if arguments.judge else []
    print(_json(mix, plan, shown, played) if arguments.json else describe(mix, plan, shown, played))
    return DONE


def _shown(mix: Mix, plan: Recommendation) -> list[Expectation]:
    """The best, the next ones, and the best of each class alone."""
    shown = [plan.best, *plan.others[:NEXT]]
    for name in mix.classes:
        others = [other for other in mix.classes if other != name]
        alone = [e for e in plan.others if not any(e.candidate.devices(other) for other in others)]
        shown += [expectation for expectation in alone[:1] if expectation not in shown]
    return shown


def _play(mix: Mix, shown: Sequence[Expectation], games: int) -> list[Measured]:
    costs = costs_of(mix)
    return [simulate(mix, expectation.candidate, costs, games=games) for expectation in shown]


def describe(mix: Mix, plan: Recommendation, shown: Sequence[Expectation], played: Sequence[Measured]) -> str:
    """For a terminal: a table, then why."""
    classes = list(mix.classes)
    header = [*classes, "TRAINING", "COST", "TRAJECTORIES/S", "UTILISATION", "PER COST"]
    rows = [_row(classes, expectation) for expectation in shown]
    if played:
        header += ["PLAYED/S", "PLAYED UTIL."]
        rows = [[*row, f"{m.rate:.3f}", f"{100 * m.utilisation:.0f}%"] for row, m in zip(rows, played, strict=True)]
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (header, *rows)]
    lines = ["  ".join(row).rstrip() for row in cells]
    lines[1] += "   <- recommended"
    expected = f"expect {plan.played.rate:.3f} trajectories/s at a utilisation of {100 * plan.played.utilisation:.0f}%"
    return "\n".join([*lines, "", f"{expected} (played; the table is worked out)", *plan.reasons])


def _row(classes: Sequence[str], expectation: Expectation) -> list[str]:
    candidate = expectation.candidate
    training = ", ".join(f"{count} {name}" for name, count in candidate.train) or "-"
    return [
        *(str(candidate.devices(name)) for name in classes),
        training,
        f"{expectation.cost:.2f}",
        f"{expectation.rate:.3f}",
        f"{100 * expectation.utilisation:.0f}%",
        f"{expectation.rate / expectation.cost:.4f}",
    ]


def _json(mix: Mix, plan: Recommendation, shown: Sequence[Expectation], played: Sequence[Measured]) -> str:
    def plain(index: int, expectation: Expectation) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(expectation)
        found["devices"] = {name: expectation.candidate.devices(name) for name in mix.classes}
        if played:
            found["played"] = msgspec.to_builtins(played[index])
        return found

    plans = [plain(index, expectation) for index, expectation in enumerate(shown)]
    document = {
        "recommended": plans[0],
        "expected_utilisation": plan.played.utilisation,
        "expected_rate": plan.played.rate,
        "others": plans[1:],
        "reasons": plan.reasons,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


if __name__ == "__main__":
    sys.exit(main())
