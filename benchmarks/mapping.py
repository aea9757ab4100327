"""``python -m benchmarks.mapping``: how close the learned mapping of tasks to hardware classes comes to the best one.

A cluster of two classes plays a mix of tasks on virtual time (``coordinator.resources.trial``); the mapping begins with
what is declared, which is wrong on purpose, with data sheets that are wrong by up to half, and sees only what the proxy
sees. Then the load shifts. The reference is exhaustive: every division of the tasks in which each goes to
one class, or half and half to two, is played with the same four chances, and so is what the mapping has found; a rate
is the mean of its four plays (those of one division differ by 2 to 3% where answers are of all lengths).

``within_*``: the rate of what was found over the best one's, worst of all cases and seeds. ``decisions_*``: from the
shift on (or from the start), until it stays within 5% of the best. ``decision_ms``: processor time of one decision.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import msgspec

from coordinator.resources.mix import Candidate, Mix, convert_mix
from coordinator.resources.planner import costs_of
from coordinator.resources.simulation import simulate
from coordinator.resources.trial import Decision, try_out
from hwprobe.cost import DeviceCost
from hwprobe.costmodel import CostModel
from hwprobe.flow import Shares
from hwprobe.mapping import Learned, Proposal, View

GAMES = {"turns": 12, "prompt": 1500, "observation": 600, "response": 40, "step_s": 0.4}
MATH = {"turns": 1, "prompt": 300, "response": 2500}
SOFTWARE = {"turns": 20, "prompt": 4000, "observation": 500, "response": 150, "step_s": 0.3}
WEB = {"turns": 8, "prompt": 2500, "observation": 1500, "response": 60, "step_s": 0.5}
PLAYED = 1000
"""Trajectories of a play that is judged."""
CHANCES = (99, 100, 101, 102)
CLOSE = 0.95


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What is played, and then what instead."""

    name: str
    before: dict[str, Any]
    after: dict[str, Any]
    devices: dict[str, int]
    declared: dict[str, str]
    reached: dict[str, tuple[float, float]] = {}  # class -> (FLOP/s, bytes/s) over what is known of it
    in_flight: int = 64

    def mix(self, tasks: Mapping[str, Any]) -> Mix:
        return convert_mix({"in_flight": self.in_flight, "train": False, "tasks": tasks}, self.name)

    @property
    def candidate(self) -> Candidate:
        return Candidate(tuple(self.devices.items()))

    def costs(self) -> dict[str, DeviceCost]:
        """In truth."""
        known = costs_of(self.mix(self.before))
        result = {}
        for name, cost in known.items():
            flops, bandwidth = self.reached.get(name, (1.0, 1.0))
            result[name] = msgspec.structs.replace(cost, flops=cost.flops * flops, bandwidth=cost.bandwidth * bandwidth)
        return result


CASES = (
    Case(
        name="weights",  # games and mathematics, declared the wrong way round; then nearly all is mathematics
        before={"games": {**GAMES, "weight": 2}, "math": MATH},
        after={"games": {**GAMES, "weight": 0.3}, "math": {**MATH, "weight": 3}},
        devices={"H800": 2, "H20": 2},
        declared={"games": "H20", "math": "H800"},
    ),
    Case(
        name="surprise",  # the H800 reach half of their FLOP/s (throttled), the H20 0.7 of their bandwidth
        before={"games": GAMES, "math": MATH},
        after={"games": {**GAMES, "observation": 100, "response": 300}, "math": {**MATH, "response": 600}},
        devices={"H800": 3, "H20": 2},
        declared={"default": "H800"},
        reached={"H800": (0.5, 1.0), "H20": (1.0, 0.7)},
    ),
    Case(
        name="lengths",  # answers that become ten times as long, observations that become short
        before={"games": GAMES, "web": WEB, "math": {**MATH, "response": 400}},
        after={"games": {**GAMES, "response": 400, "observation": 100}, "web": WEB, "math": {**MATH, "response": 4000}},
        devices={"H800": 2, "H20": 3},
        declared={"default": "H20"},
        in_flight=96,
    ),
    Case(
        name="many",  # long trajectories, three times as many as are played in a minute
        before={"games": {**GAMES, "weight": 2}, "math": MATH, "software": SOFTWARE},
        after={"games": GAMES, "math": {**MATH, "weight": 4}, "software": SOFTWARE},
        devices={"H800": 2, "H20": 4},
        declared={"default": "H800"},
        in_flight=128,
    ),
)


def divisions(tasks: Sequence[str], classes: Sequence[str]) -> Iterator[dict[str, dict[str, float]]]:
    """Each task to one class, or half and half to two."""
    whole = [{name: float(name == chosen) for name in classes} for chosen in classes]
    halves = [{name: 0.5 * (name in pair) for name in classes} for pair in itertools.combinations(classes, 2)]
    for chosen in itertools.product([*whole, *halves], repeat=len(tasks)):
        yield dict(zip(tasks, chosen, strict=True))


class Judge:
    """Plays divisions of one mix, each with the same chances."""

    def __init__(
        self,
        mix: Mix,
        candidate: Candidate,
        costs: Mapping[str, DeviceCost],
        games: int = PLAYED,
        chances: Sequence[int] = CHANCES,
    ) -> None:
        self._mix, self._candidate, self._costs, self._games = mix, candidate, costs, games
        self._chances = chances  # seeds
        self._known: dict[str, float] = {}

    def rate(self, shares: Shares) -> float:
        key = json.dumps(shares, sort_keys=True)
        if key not in self._known:
            self._known[key] = fmean(self._played(shares, seed) for seed in self._chances)
        return self._known[key]

    def _played(self, shares: Shares, seed: int) -> float:
        return simulate(self._mix, self._candidate, self._costs, games=self._games, seed=seed, shares=shares).rate

    def best(self) -> float:
        classes = [name for name, _ in self._candidate.rollout]
        return max(self.rate(shares) for shares in divisions(list(self._mix.tasks), classes))

    def settled_after(self, decisions: Sequence[Decision], best: float) -> int | None:
        """Decisions until it stays close to the best one; None where it does not."""
        late = next((d for d in reversed(decisions) if self.rate(d.shares) < CLOSE * best), None)
        count = 0 if late is None else late.number - decisions[0].number + 1
        return None if count == len(decisions) else count


class Timed:
    """The learned mapping, and what its decisions took."""

    def __init__(self) -> None:
        self._learned = Learned()
        self.seconds: list[float] = []

    async def propose(self, model: CostModel, view: View) -> Proposal:
        start = time.process_time()
        proposal = self._learned.decide(model, view)
        self.seconds.append(time.process_time() - start)
        return proposal


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    case: str
    seed: int
    declared: float  # rate of what was declared, over the best one's
    found: float  # likewise, of what holds before the shift
    learned_after: int | None  # decisions
    stale: float  # of that, after the shift
    recovered: float
    recovered_after: int | None
    trajectories: int  # that began from the shift until then


def judge(case: Case, seed: int, judges: Sequence[Judge], bests: Sequence[float], timed: Timed) -> Outcome:
    costs, mixes = case.costs(), [case.mix(case.before), case.mix(case.after)]
    before, after = try_out(
        timed, [(mix, 100) for mix in mixes], case.candidate, costs, declared=case.declared, seed=seed
    )
    recovered_after = judges[1].settled_after(after, bests[1])
    at = after[min(recovered_after or 0, len(after) - 1)]
    return Outcome(
        case=case.name,
        seed=seed,
        declared=judges[0].rate(before[0].shares) / bests[0],
        found=judges[0].rate(before[-1].shares) / bests[0],
        learned_after=judges[0].settled_after(before, bests[0]),
        stale=judges[1].rate(before[-1].shares) / bests[1],
        recovered=judges[1].rate(after[-1].shares) / bests[1],
        recovered_after=recovered_after,
        trajectories=at.began - before[-1].began,
    )


def outcomes(cases: Sequence[Case], seeds: int, timed: Timed, games: int, chances: Sequence[int]) -> Iterator[Outcome]:
    for case in cases:
        mixes = (case.before, case.after)
        judges = [Judge(case.mix(tasks), case.candidate, case.costs(), games, chances) for tasks in mixes]
        bests = [one.best() for one in judges]
        for seed in range(seeds):
            yield judge(case, seed, judges, bests, timed)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mapping", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one seed, one short play of a division")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    timed = Timed()
    seeds, games, chances = (1, PLAYED // 2, CHANCES[:1]) if arguments.quick else (arguments.seeds, PLAYED, CHANCES)
    found = list(outcomes(CASES, seeds, timed, games, chances))
    never = max(len(found), 10**6)
    figures = {
        "within_found": min(one.found for one in found),
        "within_recovered": min(one.recovered for one in found),
        "decisions_to_learn": max(never if one.learned_after is None else one.learned_after for one in found),
        "decisions_to_recover": max(never if one.recovered_after is None else one.recovered_after for one in found),
        "decision_ms": 1e3 * median(timed.seconds),
        "decision_ms_worst": 1e3 * max(timed.seconds),
    }
    if arguments.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        print(json.dumps({"figures": figures, "command": "python -m benchmarks.mapping", "machine": machine}))
        return 0
    print("case      seed  declared  found  after  shifted  recovered  after  trajectories")
    for one in found:
        learned, shifted = f"{one.found:<6.3f} {one.learned_after!s:<6}", f"{one.stale:<8.3f} {one.recovered:<10.3f}"
        print(
            f"{one.case:<9} {one.seed:<5} {one.declared:<9.3f} {learned} {shifted} {one.recovered_after!s:<6}"
            f" {one.trajectories}"
        )
    print("\n".join(f"{name}: {value:.4g}" for name, value in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
