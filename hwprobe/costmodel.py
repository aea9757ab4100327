"""The one cost model of a run: seconds of prefill and decoding per task and hardware class, as they were measured.

    engines --Work--> ClassFit (what a class reaches) --+
                                                        +--> CostModel --> routing, mapping, placement, planner
    requests -------> TaskFit (what a task asks for) ---+

Invariant: ``CostState`` is all there is to it: what was encoded and decoded again gives the same figures, and one that
newer software wrote is refused by name. With nothing measured it is the roofline's prior, and nothing is known of any
task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from hwprobe.cost import DeviceCost, ModelSize
from hwprobe.demand import Demand, TaskFit
from hwprobe.fitting import ClassFit, Work, prior_of
from hwprobe.flow import EnginePool, Network, TaskShape

FORMAT = 1


class CostState(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept and sent."""

    format: int = FORMAT
    model: ModelSize
    classes: dict[str, ClassFit]
    tasks: dict[str, TaskFit] = {}


class CostStateRefused(ValueError):
    """Bytes that are no state of a cost model, or one of another format; one line."""


class TrajectoryCost(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory of a task on a class: seconds of an engine."""

    prefill_s: float
    decode_s: float  # its share of the steps, in the batch that was asked about

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of a class: ``DeviceCost`` for one model, in seconds a token, for whoever asks often."""

    token_s: float  # arithmetic of one
    weights_s: float  # all weights are read once, in each step
    context_s: float  # keys and values of one are read
    room: int  # tokens whose keys and values fit beside the weights and the reserve

    def step_s(self, batch: float, context: float) -> float:
        """As ``DeviceCost.step_s``."""
        compute_s, reading_s = batch * self.token_s, self.weights_s + batch * context * self.context_s
        return reading_s if reading_s > compute_s else compute_s


class CostModel:
    """See the module docstring."""

    def __init__(self, state: CostState) -> None:
        self.model = state.model
        self._classes = dict(state.classes)
        self._rates: dict[str, Rates] = {}  # of classes that have not changed since they were asked about
        self.demand = Demand(state.tasks)

    @classmethod
    def prior(cls, model: ModelSize, classes: Iterable[str]) -> CostModel:
        """Nothing measured."""
        return cls(CostState(model=model, classes={name: prior_of(name, model) for name in sorted(set(classes))}))

    # ---- what happened -------------------------------------------------------------------------------------------

    def worked(self, hardware_class: str, work: Work) -> None:
        """One engine's report."""
        fit = self.fit(hardware_class)
        self._classes[hardware_class] = fit.after(self.model, work)
        self._rates.pop(hardware_class, None)

    def fit(self, hardware_class: str) -> ClassFit:
        """The prior's, of a class that is not known yet."""
        if hardware_class not in self._classes:
            self._classes[hardware_class] = prior_of(hardware_class, self.model)
        return self._classes[hardware_class]

    def inherit(self, state: CostState) -> None:
        """Of each class and task, what another model of this run has learned, where that comes of more than this."""
        for name, fit in state.classes.items():
            if fit.reports >= self.fit(name).reports:
                self._classes[name] = fit
                self._rates.pop(name, None)
        self.demand.inherit(state.tasks)

    # ---- what it costs -------------------------------------------------------------------------------------------

    def engine(self, hardware_class: str) -> DeviceCost:
        """One engine of this class, at what it reaches."""
        return self.fit(hardware_class).cost()

    def rates(self, hardware_class: str) -> Rates:
        """The same, as rates."""
        known = self._rates.get(hardware_class)
        if known is None:
            cost, model = self.engine(hardware_class), self.model
            known = self._rates[hardware_class] = Rates(
                token_s=cost.prefill_s(model, 1.0),
                weights_s=model.weight_bytes / cost.bandwidth,
                context_s=model.cache_bytes / cost.bandwidth,
                room=cost.cache_tokens(model),
            )
        return known

    def shapes(self) -> dict[str, TaskShape]:
        """Of the tasks that enough is known of."""
        return {name: fit.shape() for name, fit in self.demand.tasks.items() if fit.known}

    def seconds(self, task: str, hardware_class: str, *, batch: float) -> TrajectoryCost:
        """Raises ``KeyError`` for a task that nobody has asked for."""
        shape, cost = self.demand.tasks[task].shape(), self.engine(hardware_class)
        step_s = cost.step_s(self.model, batch, shape.mean_length)
        return TrajectoryCost(
            prefill_s=cost.prefill_s(self.model, shape.prefill_tokens), decode_s=shape.decode_tokens * step_s / batch
        )

    def network(self, engines: Mapping[str, tuple[int, int]], in_flight: float) -> Network:
        """``engines``: class -> how many, and places in the batch of each."""
        pools = {
            name: EnginePool(cost=self.engine(name), engines=count, ceiling=places)
            for name, (count, places) in engines.items()
        }
        return Network(self.model, self.shapes(), pools, max(1.0, in_flight))

    # ---- kept and sent -------------------------------------------------------------------------------------------

    def state(self) -> CostState:
        return CostState(model=self.model, classes=dict(self._classes), tasks=dict(self.demand.tasks))


def encode_state(state: CostState) -> bytes:
    """JSON."""
    return msgspec.json.encode(state)


def decode_state(data: bytes, where: str) -> CostState:
    """Raises ``CostStateRefused``."""
    try:
        found = msgspec.json.decode(data, type=_Head).format
        if found == FORMAT:
            return msgspec.json.decode(data, type=CostState)
    except msgspec.MsgspecError as error:
        raise CostStateRefused(f"{where}: expected the state of a cost model, found {error}") from None
    raise CostStateRefused(
        f"{where}: a cost model of format {found}; this software reads format {FORMAT}: remove it to begin anew"
    )


class _Head(msgspec.Struct, frozen=True):
    format: int
