"""What training gained on the same held-out tasks: two files that ``bin/eval RUN --save FILE`` wrote.

    bin/eval runs/latest --version 0 --episodes 400 --save before.jsonl
    bin/eval runs/latest --episodes 400 --save after.jsonl
    python -m benchmarks.gain before.jsonl after.jsonl

The interval is that of the mean of paired differences (normal approximation); tasks that pose the same question count
each time they were drawn, and how many different ones there were is told.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

Z = 1.959964
"""Of a two-sided 95% interval."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gain", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--answers", type=int, default=10, help="how many episodes to show side by side (default: 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    try:
        pairs = paired(arguments.before, arguments.after)
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    figures = gain(pairs)
    if arguments.json:
        print(json.dumps({"figures": figures, "command": "python -m benchmarks.gain"}))
        return 0
    print(
        f"{figures['episodes']} episodes, {figures['questions']} different questions\n"
        f"success {figures['before']:.1%} -> {figures['after']:.1%}, gain {figures['gain']:+.1%} "
        f"(95% interval {figures['gain_low']:+.1%} to {figures['gain_high']:+.1%})\n"
    )
    print("| question | before | after |\n|---|---|---|")
    for before, after in pairs[: arguments.answers]:
        print(f"| {question(before)} | {told(before)} | {told(after)} |")
    return 0


def paired(before: Path, after: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Episodes of the same tickets. Raises ``ValueError`` where the files are of different tasks."""
    first, second = (
        {episode["ticket"]: episode for episode in map(json.loads, path.read_text().splitlines())}
        for path in (before, after)
    )
    if first.keys() != second.keys():
        raise ValueError(f"{before} and {after} are of different tasks: evaluate as many episodes of the same job")
    for ticket, episode in first.items():
        asked = question(episode), question(second[ticket])
        if all(asked) and asked[0] != asked[1]:  # one that was lost before it began asks nothing
            raise ValueError(f"{ticket}: {before} asks {asked[0]!r}, {after} {asked[1]!r}")
    return [(first[ticket], second[ticket]) for ticket in first]


def gain(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, float]:
    """Success before and after, and the paired difference with its interval."""
    differences = [float(after["success"]) - float(before["success"]) for before, after in pairs]
    mean = statistics.fmean(differences)
    half = Z * statistics.stdev(differences) / math.sqrt(len(differences))
    return {
        "episodes": len(pairs),
        "questions": len({question(before) or question(after) for before, after in pairs}),
        "before": statistics.fmean(float(before["success"]) for before, _ in pairs),
        "after": statistics.fmean(float(after["success"]) for _, after in pairs),
        "gain": mean,
        "gain_low": mean - half,
        "gain_high": mean + half,
    }


def question(episode: dict[str, Any]) -> str:
    """What the episode begins with; empty for one that was lost before it did."""
    return next((text for speaker, text in episode["transcript"] if speaker == "observation"), "")


def told(episode: dict[str, Any]) -> str:
    """What the policy said, turn by turn, and whether it was right."""
    words = [" ".join(text.split()) for speaker, text in episode["transcript"] if speaker == "action"]
    return f"{' / '.join(words)} ({'right' if episode['success'] else 'wrong'})"


if __name__ == "__main__":
    sys.exit(main())
