"""Decides again and again which hardware class plays which task, and tells the proxies: see ``hwprobe.mapping``.

    engines --Served(work), requests--> proxy's cost model --CostsState--> mapping.propose --Assign--> proxy

Invariant: the decision is the mapping's alone, from the cost model that the proxy has; an order says by whom and why,
the proxy keeps it, and a person can take it back (``UndoMapping``), after which nothing is ordered for a while. A proxy
that does not answer costs one look. A proxy that comes later, a successor or one more, is told, before anything is
asked or ordered there, what those before knew and were ordered when they were last looked at. What the model knows is
kept in the run directory (``cost.json``), for the planner and for a run that goes on: every ``KEEP_EVERY_S``, and as
the last look found it once the run ends, however it ends.

Of several proxies each has the trajectories that are placed there and divides them between its own engines: that is one
decision for each, from its own model. ``merged`` is what they know together.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from actors.core import Node, Ref
from actors.proxy.messages import Assign, CostsState, DescribeCosts, EngineState, InheritCosts
from coordinator.engines import Engines
from coordinator.leadership import SOLE, Authority
from coordinator.observe.lines import replace_file
from coordinator.resources.looking import LOOK_EVERY_S, TIMEOUT_S, Looking
from hwprobe.cost import ModelSize, model_size
from hwprobe.costmodel import CostModel, CostState, CostStateRefused, decode_state, encode_state
from hwprobe.demand import TaskFit
from hwprobe.fitting import ClassFit
from hwprobe.mapping import CHANGE, Proposal, TaskMapping, View, describe, difference

log = logging.getLogger(__name__)

KEEP_EVERY_S = 20.0
COST_FILE = "cost.json"


class Mapper(Looking):
    """See the module docstring. ``file``: where the cost model is kept; ``declared``: the job's classes."""

    def __init__(
        self,
        node: Node,
        engines: Engines,
        mapping: TaskMapping,
        *,
        declared: Mapping[str, str],
        file: Path,
        say: Callable[[str], None],
        authority: Authority = SOLE,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        super().__init__(node, engines, look_every_s)
        self._mapping = mapping
        self._declared = dict(declared)
        self._file = file
        self._say = say
        self._authority = authority
        self._kept_at: float | None = None
        self._last: tuple[CostsState, float] | None = None  # what the proxies said, and when
        self._met: set[Ref] = set()  # proxies that knew it, or have been told

    async def run(self) -> None:
        try:
            await super().run()
        finally:  # by cancellation: the end of the run
            if self._last is not None:
                self._write(self._last[0].state)

    async def _look(self, engines: Sequence[EngineState]) -> None:
        there = self._engines.proxies
        for name, proxy in there.items():
            if proxy not in self._met and self._last is not None:
                await self._hand_over(name, proxy, *self._last)
            self._met.add(proxy)
        known = await self._engines.ask_each(DescribeCosts(), CostsState, timeout_s=TIMEOUT_S)
        if self._engines.proxies != there:  # meanwhile: what was decided from this would be another's
            return
        self._last = merged(list(known.values())), asyncio.get_running_loop().time()
        self._keep(self._last[0].state)
        for name, costs in known.items():
            await self._decide(name, there[name], costs, [engine for engine in engines if engine.proxy == name])

    async def _decide(self, name: str, proxy: Ref, costs: CostsState, engines: Sequence[EngineState]) -> None:
        view = View(engines=pools(engines), declared=self._declared, current=costs.shares, in_flight=costs.in_flight)
        proposal = await self._mapping.propose(CostModel(costs.state), view)
        if difference(proposal.shares, costs.shares) <= CHANGE or costs.held_s > 0:
            return
        if not self._authority.leads():
            log.warning("the mapping stays as it is: it is uncertain whether this process leads")
            return
        await self._order(name, proxy, proposal)

    async def _hand_over(self, name: str, proxy: Ref, costs: CostsState, at: float) -> None:
        age_s = asyncio.get_running_loop().time() - at
        inherited = await self._node.ask(proxy, InheritCosts(costs, age_s), timeout_s=TIMEOUT_S, retries=2)
        if inherited.taken and costs.shares:
            who = f"proxy {name}" if len(self._engines.proxies) > 1 else "the proxy's successor"
            self._say(f"{who} goes on with mapping {costs.number}: {describe(costs.shares)}")

    async def _order(self, name: str, proxy: Ref, proposal: Proposal) -> None:
        order = Assign(proposal.shares, proposal.by, proposal.why)
        assigned = await self._node.ask(proxy, order, timeout_s=TIMEOUT_S, retries=2)
        at = f" at {name}" if len(self._engines.proxies) > 1 else ""
        if assigned.refused:
            log.info("the mapping%s stays as it is: %s", at, assigned.refused)
        else:
            self._say(f"mapping {assigned.number}{at} ({proposal.by}): {describe(proposal.shares)}: {proposal.why}")

    def _keep(self, state: CostState) -> None:
        now = asyncio.get_running_loop().time()
        if self._kept_at is None:
            self._kept_at = now
        if now - self._kept_at >= KEEP_EVERY_S:
            self._kept_at = now
            self._write(state)

    def _write(self, state: CostState) -> None:
        if not state.tasks:
            return
        try:
            replace_file(self._file, encode_state(state))
        except OSError as error:
            log.warning("%s: the cost model is not kept: %s", self._file, error.strerror or error)


def merged(known: Sequence[CostsState]) -> CostsState:
    """What several proxies know, as one: of each class and each task the figures of the one that has seen most of it;
    the orders of the one that has had most. Raises ``ValueError`` for none."""
    if not known:
        raise ValueError("expected the costs of one proxy at least, found none")
    classes: dict[str, ClassFit] = {}
    tasks: dict[str, TaskFit] = {}
    for costs in known:
        for name, fit in costs.state.classes.items():
            if name not in classes or fit.reports > classes[name].reports:
                classes[name] = fit
        for name, task in costs.state.tasks.items():
            if name not in tasks or task.responses > tasks[name].responses:
                tasks[name] = task
    most = max(known, key=lambda costs: costs.number)
    state = msgspec.structs.replace(most.state, classes=classes, tasks=tasks)
    return msgspec.structs.replace(most, state=state, in_flight=sum(costs.in_flight for costs in known))


def pools(engines: Sequence[EngineState]) -> dict[str, tuple[int, int]]:
    """Class -> engines that serve or are about to again, and the places in the batch of each."""
    result: dict[str, tuple[int, int]] = {}
    for engine in engines:
        if engine.state in ("serving", "suspended"):
            count, places = result.get(engine.hardware_class, (0, engine.places))
            result[engine.hardware_class] = (count + 1, min(places, engine.places))
    return result


def known_costs(run: Path, policy: Path, dtype: str, classes: Iterable[str]) -> CostModel:
    """What a run's earlier sitting has measured, or else what the data sheets say of this model and these classes."""
    file = run / COST_FILE
    try:
        return CostModel(decode_state(file.read_bytes(), str(file)))
    except FileNotFoundError:
        pass
    except (OSError, CostStateRefused) as error:
        log.warning("the cost model begins anew: %s", error)
    try:
        config = json.loads((policy / "config.json").read_text(encoding="utf-8"))
        size = model_size(config, bytes_per_value=4 if dtype == "float32" else 2)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s: the policy's size is not known, costs are fitted to another's: %r", policy, error)
        size = ModelSize()
    return CostModel.prior(size, classes)
