"""How many devices of which class: the mix that plays and trains most, what it will be used to, and why.

Invariant: a pure function of the mix of tasks. Every candidate's rate is worked out; those that come within ``RIVALS``
of the highest are played on virtual time (``simulation``), because the network below knows neither chance nor routing,
and the one that did best is recommended. Each candidate is a closed network of ``in_flight`` trajectories, which go
round between environments, engines and training:

    in_flight = rate x (environment time + wait for prefill) + sequences in decoding + trajectories in training

Its one solution is the rate (every term grows with it). An engine that spends the share p of its time on prefill
decodes in the rest; to bring forth x tokens a second then takes a batch B with B / step(B) = x. Tasks are split
between the classes by comparative advantage: sorted by what they cost here over what they cost there, the first ones go
here, up to the point at which the rate is highest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import msgspec

from coordinator.resources.mix import Candidate, Mix, TaskShape, engine_s, training_s
from coordinator.resources.simulation import Measured, simulate
from hwprobe.cost import DeviceCost, device_cost

SPLITS = 12
"""Steps in which the border between the classes' tasks is looked for."""

BISECTIONS = 32
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
            costs[name] = device_cost(name, mix.model, offer.memory_gib)
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
    names = sorted(costs, key=lambda name: -costs[name].flops / costs[name].devices)
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
    return max(
        (_expect(mix, candidate, costs, shares) for shares in _splits(mix, candidate, costs)), key=lambda e: e.rate
    )


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


class _Load:
    """What one class is asked for by one trajectory of the mix, and how an engine bears a rate of them."""

    def __init__(self, mix: Mix, cost: DeviceCost, devices: int, shares: Mapping[str, float]) -> None:
        self.engines = devices // cost.devices
        self._mix, self._cost = mix, cost
        weights = {task: mix.share(task) * share for task, share in shares.items()}
        tasks = {task: mix.tasks[task] for task, weight in weights.items() if weight}
        self.prefill_s = sum(weights[t] * cost.prefill_s(mix.model, shape.prefill_tokens) for t, shape in tasks.items())
        self.tokens = sum(weights[task] * shape.decode_tokens for task, shape in tasks.items())
        self.turns = sum(weights[task] * shape.turns for task, shape in tasks.items())
        # A sequence is decoded at all its lengths; what is longer is in the batch for longer.
        spent = sum(weights[task] * shape.decode_tokens * _mean_length(shape) for task, shape in tasks.items())
        self.context = spent / self.tokens if self.tokens else 1.0
        longest = max((shape.length for shape in tasks.values()), default=1.0)
        ceiling = mix.classes[cost.hardware_class].ceiling
        self.places = cost.places(mix.model, max(self.context, longest / 2), ceiling)

    def bears(self, rate: float) -> tuple[float, float] | None:
        """(Share of the time on prefill, sequences decoded at once) of one engine, or None where it is too much."""
        prefill = rate * self.prefill_s / self.engines
        if prefill >= 1:
            return None
        wanted = rate * self.tokens / self.engines / (1 - prefill)  # tokens a second, while it decodes
        batch = self._batch(wanted)
        return None if batch is None else (prefill, batch)

    def _batch(self, wanted: float) -> float | None:
        """The batch with this speed: B / step(B) = x with a step of a + b B, while that is not bound by compute."""
        model, cost = self._mix.model, self._cost
        fixed_s = cost.step_s(model, 0.0, self.context)
        each_s = self.context * model.cache_bytes / cost.bandwidth
        if wanted * max(each_s, cost.prefill_s(model, 1.0)) >= 1:
            return None
        batch = fixed_s * wanted / (1 - each_s * wanted)
        return batch if batch <= self.places else None

    def in_system(self, rate: float, prefill: float, batch: float) -> float:
        """Trajectories here: decoding (while others are prefilled, too), and waiting for prefill."""
        waits = prefill * self.prefill_s / max(self.turns, 1e-9) / (2 * (1 - prefill))
        return self.engines * batch + rate * (self.prefill_s + self.turns * waits)


def _mean_length(shape: TaskShape) -> float:
    """Tokens of a trajectory when one of its tokens is sampled, on average."""
    return shape.prompt + (shape.length - shape.prompt) / 2


def _expect(
    mix: Mix, candidate: Candidate, costs: Mapping[str, DeviceCost], shares: dict[str, dict[str, float]]
) -> Expectation:
    loads = {
        name: _Load(mix, costs[name], devices, {task: share[name] for task, share in shares.items()})
        for name, devices in candidate.rollout
    }
    environment_s = sum(mix.share(task) * shape.environment_s for task, shape in mix.tasks.items())
    train_s = training_s(mix, candidate, costs)

    def in_flight(rate: float) -> float:
        busy = rate * train_s
        if busy >= 1:
            return math.inf
        total = rate * environment_s + busy + busy**2 / (2 * (1 - busy))
        for load in loads.values():
            state = load.bears(rate)
            if state is None:
                return math.inf
            total += load.in_system(rate, *state)
        return total

    low, high = 0.0, 1.0
    while in_flight(high) < mix.in_flight:
        high *= 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if in_flight(middle) <= mix.in_flight else (low, middle)
    return _described(mix, candidate, shares, loads, rate=low, training=low * train_s)


def _described(
    mix: Mix,
    candidate: Candidate,
    shares: dict[str, dict[str, float]],
    loads: Mapping[str, _Load],
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
