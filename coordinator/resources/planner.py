"""How many devices of which class: the mix that plays and trains most, what it will be used to, and why.

Invariant: a pure function of the mix of tasks. Every candidate's rate is worked out; those that come within ``RIVALS``
of the highest are played on virtual time (``simulation``), because the network below knows neither chance nor routing,
and the one that did best is recommended. Each candidate is a closed network of ``in_flight`` trajectories, which go
round between environments, engines and training (``hwprobe.flow``). Tasks are split between the classes by comparative
advantage: sorted by what they cost here over what they cost there, the first ones go here, up to the point at which the
rate is highest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import msgspec

from coordinator.resources.mix import Candidate, Mix, engine_s, trainer_cost, training_s
from coordinator.resources.simulation import Measured, simulate
from hwprobe.cost import DeviceCost, device_cost
from hwprobe.flow import SPLITS, ClassLoad, EnginePool, Network, TaskShape

FEW = 400
"""Candidates that are all looked at; of more, a grid of ``COARSE`` steps is."""

COARSE = 12

RIVALS = 0.12
"""How far below the highest expected rate a candidate may be to be played."""

MOST_RIVALS = 10
LEAST_GAMES = 800
GAMES_PER_PLACE = 10
ALIKE = 0.015
"""What two plays of that length differ by, by chance; of what differs by less the cheapest is taken."""


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """What a candidate is expected to do."""

    candidate: Candidate
    rate: float  # trajectories a second
    utilisation: float  # share of the time in which a device computes, over all devices
    by_class: dict[str, float]  # the same, of the devices that play
    training: float  # the same, of those that train; 0 where none do
    shares: dict[str, dict[str, float]]  # task -> class -> share of its trajectories
    batch: dict[str, float]  # sequences that an engine decodes at once
    cost: float
    bound: str  # what keeps the rate from being higher


class NoPlan(ValueError):
    """Nothing can be built from what is offered; the message says why."""


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """The best candidate, the next ones, and the reason in words."""

    best: Expectation
    played: Measured  # what the best one did on virtual time: the utilisation to expect
    others: tuple[Expectation, ...]  # by falling rate
    reasons: tuple[str, ...]


def recommend(mix: Mix, *, gpus: int | None = None, budget: float | None = None) -> Recommendation:
    """The mix with the highest rate on virtual time; of those ``ALIKE`` the cheapest. Raises ``NoPlan``."""
    costs = costs_of(mix)
    found = list(_search(mix, costs, gpus, budget).values())
    if not found:
        limit = f"{gpus} devices" if gpus is not None else f"a budget of {budget:g}"
        sizes = ", ".join(f"{name}: {cost.devices}" for name, cost in costs.items())
        trainer = " and one trainer" if mix.train else ""
        raise NoPlan(f"{limit}: not enough for one engine{trainer} (devices of an engine: {sizes})")
    found.sort(key=lambda expectation: (-expectation.rate, expectation.candidate))
    rivals = [e for e in found if e.rate >= (1 - RIVALS) * found[0].rate][:MOST_RIVALS]
    games = max(LEAST_GAMES, GAMES_PER_PLACE * mix.in_flight)
    plays = [(simulate(mix, rival.candidate, costs, games=games), rival) for rival in rivals]
    top = max(played.rate for played, _ in plays)
    equal = [(played, rival) for played, rival in plays if played.rate >= (1 - ALIKE) * top]
    played, best = min(equal, key=lambda pair: (pair[1].cost, -pair[0].rate))
    others = [expectation for expectation in found if expectation is not best]
    reasons = (
        *_reasons(mix, best, costs),
        f"{len(rivals)} of {len(found)} candidates were played, {games} trajectories each",
    )
    return Recommendation(best=best, played=played, others=tuple(others), reasons=reasons)


def _search(
    mix: Mix, costs: Mapping[str, DeviceCost], gpus: int | None, budget: float | None
) -> dict[Candidate, Expectation]:
    """All candidates where they are few; else a coarse grid, and then the neighbourhood of the best, ever finer."""
    every = list(candidates(mix, costs, gpus=gpus, budget=budget))
    if len(every) <= FEW:
        return {candidate: expect(mix, candidate, costs) for candidate in every}
    names = list(mix.classes)
    points = {candidate: tuple(candidate.devices(name) for name in names) for candidate in every}
    trains = {candidate: sum(count for _, count in candidate.train) for candidate in every}
    step = max(max(point) for point in points.values()) / COARSE
    seen: dict[Candidate, Expectation] = {}
    near = set(every)
    while near:
        for candidate in sorted(_thinned(near, points, trains, step) - seen.keys()):
            seen[candidate] = expect(mix, candidate, costs)
        if step < 1:
            break
        best = max(seen, key=lambda candidate: seen[candidate].rate)
        near = {
            c for c in every if abs(points[c][0] - points[best][0]) <= step and abs(trains[c] - trains[best]) <= step
        }
        step /= 2
    return seen


def _thinned(
    near: set[Candidate], points: Mapping[Candidate, tuple[int, ...]], trains: Mapping[Candidate, int], step: float
) -> set[Candidate]:
    """One candidate for each cell of a grid of this width."""
    cells: dict[tuple[int, int], Candidate] = {}
    for candidate in sorted(near):
        cells.setdefault((int(points[candidate][0] / step), int(trains[candidate] / step)), candidate)
    return set(cells.values())


def costs_of(mix: Mix) -> dict[str, DeviceCost]:
    """One engine of each class that can hold the model. Raises ``NoPlan`` where none can."""
    costs, refused = {}, []
    for name, offer in mix.classes.items():
        try:
            costs[name] = device_cost(name, mix.model, offer.memory_gib, mix.efficiency.get(name))
        except ValueError as error:
            refused.append(str(error))
    if not costs:
        raise NoPlan("; ".join(refused))
    return costs


def candidates(
    mix: Mix, costs: Mapping[str, DeviceCost], *, gpus: int | None = None, budget: float | None = None
) -> Iterator[Candidate]:
    """Every way to divide so many devices, or so much money, into engines and trainers. Training goes to the class
    with the most FLOP/s that is there."""
    if (gpus is None) == (budget is None):
        raise NoPlan("expected a number of devices or a budget, one of the two")
    flops = {name: cost.flops / cost.devices for name in costs if (cost := trainer_cost(mix, name))}
    names = sorted(costs, key=lambda name: -flops[name])
    for counts in _counts(mix, names, gpus, budget):
        trainer = next((name for name in names if counts[name]), None)
        if trainer is None:
            continue
        size = costs[trainer].devices
        for training in range(size, counts[trainer] + 1, size) if mix.train else [0]:
            rollout = {
                name: (count - training * (name == trainer)) // costs[name].devices * costs[name].devices
                for name, count in counts.items()
            }
            if any(rollout.values()):
                yield Candidate(
                    tuple((name, count) for name, count in rollout.items() if count),
                    ((trainer, training),) if training else (),
                )


def _counts(mix: Mix, names: list[str], gpus: int | None, budget: float | None) -> Iterator[dict[str, int]]:
    first, *rest = names
    most = gpus if gpus is not None else int((budget or 0.0) / mix.classes[first].cost)
    for count in range(most + 1):
        if not rest:
            yield {first: count}
        elif gpus is not None:
            yield {first: count, rest[0]: gpus - count}
        else:
            left = (budget or 0.0) - count * mix.classes[first].cost
            yield {first: count, rest[0]: int(left / mix.classes[rest[0]].cost + 1e-9)}


def expect(mix: Mix, candidate: Candidate, costs: Mapping[str, DeviceCost]) -> Expectation:
    """The best way to use a candidate."""
    pools = {
        name: EnginePool(cost=cost, engines=devices // cost.devices, ceiling=mix.classes[name].ceiling)
        for name, devices in candidate.rollout
        if (cost := costs[name])
    }
    network = Network(mix.model, mix.tasks, pools, mix.in_flight, train_s=training_s(mix, candidate))
    return max((_expect(mix, candidate, network, shares) for shares in _splits(mix, candidate, costs)), key=_rate)


def _rate(expectation: Expectation) -> float:
    return expectation.rate


def _splits(mix: Mix, candidate: Candidate, costs: Mapping[str, DeviceCost]) -> Iterator[dict[str, dict[str, float]]]:
    """Task -> class -> share, along the order of comparative advantage."""
    classes = [name for name, _ in candidate.rollout]
    if len(classes) == 1:
        yield {task: {classes[0]: 1.0} for task in mix.tasks}
        return
    here, there = classes
    tasks = sorted(mix.tasks, key=lambda task: _advantage(mix, mix.tasks[task], costs[here], costs[there]))
    for step in range(len(tasks) * SPLITS + 1):
        border = step / SPLITS
        yield {
            task: {here: (share := min(1.0, max(0.0, border - place))), there: 1.0 - share}
            for place, task in enumerate(tasks)
        }


def _advantage(mix: Mix, shape: TaskShape, here: DeviceCost, there: DeviceCost) -> float:
    return engine_s(mix, shape, here) / engine_s(mix, shape, there)


def _expect(mix: Mix, candidate: Candidate, network: Network, shares: dict[str, dict[str, float]]) -> Expectation:
    loads = network.loads(shares)
    rate = network.rate(shares, loads=loads)
    return _described(mix, candidate, shares, loads, rate=rate, training=rate * network.train_s)


def _described(
    mix: Mix,
    candidate: Candidate,
    shares: dict[str, dict[str, float]],
    loads: Mapping[str, ClassLoad],
    *,
    rate: float,
    training: float,
) -> Expectation:
    by_class, batch, fullest = {}, {}, {}
    for name, load in loads.items():
        prefill, decoding = load.bears(rate) or (1.0, float(load.places))
        # An engine rests when it has nothing to decode: as often as a Poisson number of that mean is 0.
        by_class[name] = prefill + (1 - prefill) * -math.expm1(-decoding)
        batch[name] = decoding
        fullest[f"engines on {name}"] = max(prefill, decoding / load.places if load.places else 1.0)
    playing = sum(by_class[name] * devices for name, devices in candidate.rollout)
    learning = sum(devices for _, devices in candidate.train)
    devices = sum(count for _, count in candidate.rollout) + learning
    if candidate.train:
        fullest["training"] = training
    most = max(fullest, key=lambda name: fullest[name])
    return Expectation(
        candidate=candidate,
        rate=rate,
        utilisation=(playing + training * learning) / devices,
        by_class=by_class,
        training=training,
        shares=shares,
        batch=batch,
        cost=sum(candidate.devices(name) * offer.cost for name, offer in mix.classes.items()),
        bound=most if fullest[most] > 0.9 else f"trajectories in flight ({mix.in_flight})",
    )


def _reasons(mix: Mix, best: Expectation, costs: Mapping[str, DeviceCost]) -> Iterator[str]:
    if len(costs) == 2:
        here, there = costs
        for task, shape in mix.tasks.items():
            seconds = {name: engine_s(mix, shape, costs[name]) for name in costs}
            ahead, behind = sorted((here, there), key=lambda name: seconds[name])
            money = {name: seconds[name] * mix.classes[name].cost for name in costs}
            cheaper = min(money, key=lambda name: money[name])
            times = seconds[behind] / seconds[ahead]
            yield (
                f"{task}: {shape.prefill_tokens:.0f} tokens to prefill, {shape.decode_tokens:.0f} to decode;"
                f" {ahead} takes {seconds[ahead]:.2f} s of a device, {behind} {times:.2f} times as much;"
                f" cheaper on {cheaper}"
            )
    for task, share in best.shares.items():
        where = ", ".join(f"{name} {100 * part:.0f}%" for name, part in share.items() if part)
        yield f"{task} goes to {where}"
    if best.candidate.train:
        ((name, devices),) = best.candidate.train
        yield f"{devices} x {name} train, {100 * best.training:.0f}% of the time"
    yield f"limited by {best.bound}"
