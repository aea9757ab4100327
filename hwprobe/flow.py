"""How many trajectories a second a set of engines plays: a closed network, by means.

Invariant: a pure function of shapes, pools and shares; the rate that it gives is the only one at which what is on its
way is what may be (every term grows with the rate):

    in_flight = rate x (environment time + wait for prefill) + sequences in decoding + trajectories in training

An engine that spends the share p of its time on prefill decodes in the rest; to bring forth x tokens a second then
takes a batch B with B / step(B) = x. ``divided`` finds the shares of the highest rate: between two classes tasks are
sorted by what they cost here over what they cost there (comparative advantage), the first ones go here, up to the point
at which the rate is highest; of more than two classes, two at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec

from hwprobe.cost import DeviceCost, ModelSize

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Shares = Mapping[str, Mapping[str, float]]
"""Task -> hardware class -> share of its trajectories; a task's shares add up to 1."""

SPLITS = 12
"""Steps of a task's share in which the border between two classes is looked for, and the finer ones around the best."""

BISECTIONS = 32
ROUNDS = 3
"""Of going through all pairs of classes, where there are more than two."""
GAIN = 1e-4
"""By less a rate is not higher."""


class TaskShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Means of one task's trajectories."""

    weight: Positive = 1.0  # how often it is posed
    turns: Positive = 1.0
    prompt: Positive = 500.0  # tokens before the first turn
    observation: NotNegative = 0.0  # tokens that each further turn brings
    response: Positive = 100.0  # tokens sampled a turn
    reset_s: NotNegative = 0.0
    step_s: NotNegative = 0.0  # the environment's time a turn

    @property
    def prefill_tokens(self) -> float:
        """With the prefix kept where it was computed, each token is prefilled once."""
        return self.prompt + (self.turns - 1) * self.observation

    @property
    def decode_tokens(self) -> float:
        return self.turns * self.response

    @property
    def length(self) -> float:
        """Tokens at the end."""
        return self.prefill_tokens + self.decode_tokens

    @property
    def mean_length(self) -> float:
        """Tokens of a trajectory when one of its tokens is sampled, on average."""
        return self.prompt + (self.length - self.prompt) / 2

    @property
    def environment_s(self) -> float:
        return self.reset_s + self.turns * self.step_s


class EnginePool(msgspec.Struct, frozen=True, kw_only=True):
    """The engines of one hardware class."""

    cost: DeviceCost  # of one engine
    engines: int
    ceiling: int = 128  # sequences in one engine's batch


class ClassLoad:
    """What one class is asked for by one trajectory of the mix, and how an engine bears a rate of them.

    ``weights``: task -> how often a trajectory is of this task and played here."""

    def __init__(
        self, model: ModelSize, pool: EnginePool, tasks: Mapping[str, TaskShape], weights: Mapping[str, float]
    ) -> None:
        cost = pool.cost
        self.engines = pool.engines
        here = [(weight, tasks[task]) for task, weight in weights.items() if weight > 0]
        token_s = cost.prefill_s(model, 1.0)
        self.prefill_s = sum(weight * shape.prefill_tokens for weight, shape in here) * token_s
        self.tokens = sum(weight * shape.decode_tokens for weight, shape in here)
        self.turns = sum(weight * shape.turns for weight, shape in here)
        # A sequence is decoded at all its lengths; what is longer is in the batch for longer.
        spent = sum(weight * shape.decode_tokens * shape.mean_length for weight, shape in here)
        self.context = spent / self.tokens if self.tokens else 1.0
        longest = max((shape.length for _, shape in here), default=1.0)
        self.places = cost.places(model, max(self.context, longest / 2), pool.ceiling)
        self._fixed_s = cost.step_s(model, 0.0, self.context)
        self._each_s = self.context * model.cache_bytes / cost.bandwidth
        self._least_s = max(self._each_s, token_s)

    def bears(self, rate: float) -> tuple[float, float] | None:
        """(Share of the time on prefill, sequences decoded at once) of one engine, or None where it is too much."""
        prefill = rate * self.prefill_s / self.engines
        if prefill >= 1:
            return None
        # Tokens a second while it decodes, and the batch with this speed: B / step(B) = x with a step of a + b B, while
        # that is not bound by compute.
        wanted = rate * self.tokens / self.engines / (1 - prefill)
        if wanted * self._least_s >= 1:
            return None
        batch = self._fixed_s * wanted / (1 - self._each_s * wanted)
        return (prefill, batch) if batch <= self.places else None

    def in_system(self, rate: float, prefill: float, batch: float) -> float:
        """Trajectories here: decoding (while others are prefilled, too), and waiting for prefill."""
        waits = prefill * self.prefill_s / max(self.turns, 1e-9) / (2 * (1 - prefill))
        return self.engines * batch + rate * (self.prefill_s + self.turns * waits)


class Network:
    """See the module docstring. ``train_s``: seconds that all trainers together take for one trajectory."""

    def __init__(
        self,
        model: ModelSize,
        tasks: Mapping[str, TaskShape],
        pools: Mapping[str, EnginePool],
        in_flight: float,
        *,
        train_s: float = 0.0,
    ) -> None:
        self.model = model
        self.tasks = tasks
        self.pools = pools
        self.in_flight = in_flight
        self.train_s = train_s
        total = sum(shape.weight for shape in tasks.values())
        self._often = {task: shape.weight / total for task, shape in tasks.items()}
        self._environment_s = sum(self._often[task] * shape.environment_s for task, shape in tasks.items())

    def loads(self, shares: Shares) -> dict[str, ClassLoad]:
        """By class."""
        return {
            name: ClassLoad(
                self.model,
                pool,
                self.tasks,
                {task: often * shares[task].get(name, 0.0) for task, often in self._often.items()},
            )
            for name, pool in self.pools.items()
        }

    def rate(self, shares: Shares, *, loads: Mapping[str, ClassLoad] | None = None) -> float:
        """Trajectories a second."""
        bearing = [*(self.loads(shares) if loads is None else loads).values()]

        def possible(rate: float) -> bool:
            busy = rate * self.train_s
            if busy >= 1:
                return False
            total = rate * self._environment_s + busy + busy**2 / (2 * (1 - busy))
            for load in bearing:
                state = load.bears(rate)
                if state is None:
                    return False
                total += load.in_system(rate, *state)
                if total > self.in_flight:
                    return False
            return total <= self.in_flight

        low, high = 0.0, 1.0
        while possible(high):
            high *= 2
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if possible(middle) else (low, middle)
        return low

    # ---- the best shares -----------------------------------------------------------------------------------------

    def engine_s(self, task: str, hardware_class: str) -> float:
        """Seconds of an engine that a trajectory takes there, in the batch that there would be if all were decoding, or
        half of what fits."""
        pool, shape = self.pools[hardware_class], self.tasks[task]
        engines = sum(other.engines for other in self.pools.values())
        half = pool.cost.places(self.model, shape.length, pool.ceiling) / 2
        batch = max(1.0, min(half, self.in_flight / engines))
        decode_s = shape.decode_tokens * pool.cost.step_s(self.model, batch, shape.length / 2) / batch
        return pool.cost.prefill_s(self.model, shape.prefill_tokens) + decode_s

    def divided(self, start: Shares) -> tuple[dict[str, dict[str, float]], float]:
        """The best shares that are found, and their rate; not worse than ``start``."""
        best = {task: {name: start[task].get(name, 0.0) for name in self.pools} for task in self.tasks}
        rate = self.rate(best)
        pairs = list(itertools.combinations(self.pools, 2))
        for _ in range(ROUNDS if len(pairs) > 1 else 1):
            before = rate
            for here, there in pairs:
                for border in self._borders(best, here, there):
                    found = self.rate(border)
                    if found > rate * (1 + GAIN):
                        best, rate = border, found
            if rate <= before * (1 + GAIN):
                break
        return best, rate

    def _borders(self, shares: Shares, here: str, there: str) -> Iterator[dict[str, dict[str, float]]]:
        """What the two classes have of each task, divided anew: coarsely, then finely around the best."""
        own = {task: shares[task][here] + shares[task][there] for task in self.tasks}
        order = sorted(
            (task for task in self.tasks if own[task] > 0),
            key=lambda task: self.engine_s(task, here) / self.engine_s(task, there),
        )

        def at(border: float) -> dict[str, dict[str, float]]:
            divided = {task: dict(shares[task]) for task in self.tasks}
            for place, task in enumerate(order):
                part = min(1.0, max(0.0, border - place))
                divided[task][here], divided[task][there] = part * own[task], (1.0 - part) * own[task]
            return divided

        coarse = [step / SPLITS for step in range(len(order) * SPLITS + 1)]
        rates = {border: self.rate(at(border)) for border in coarse}
        top = max(rates, key=lambda border: rates[border])
        yield at(top)
        for step in range(1, SPLITS // 2):
            for border in (top - 2 * step / SPLITS**2, top + 2 * step / SPLITS**2):
                if 0 <= border <= len(order):
                    yield at(border)


def is_finite(shares: Shares) -> bool:
    """Whether every share is a number from 0 to 1, and each task's add up to 1."""
    return all(
        all(math.isfinite(share) and 0 <= share <= 1 for share in of_task.values())
        and math.isclose(sum(of_task.values()), 1.0, abs_tol=1e-6)
        for of_task in shares.values()
    )
