"""Decides again and again which hardware class plays which task, and tells the proxy: see ``hwprobe.mapping``.

    engines --Served(work), requests--> proxy's cost model --CostsState--> mapping.propose --Assign--> proxy

Invariant: the decision is the mapping's alone, from the cost model that the proxy has; an order says by whom and why,
the proxy keeps it, and a person can take it back (``UndoMapping``), after which nothing is ordered for a while. A proxy
that does not answer costs one look. A proxy's successor is told, before anything is asked or ordered there, what the
one before knew and was ordered when it was last looked at. What the model knows is kept in the run directory
(``cost.json``), for the planner and for a run that goes on: every ``KEEP_EVERY_S``, and as the last look found it once
the run ends, however it ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from actors.core import Node, Ref
from actors.proxy.messages import Assign, CostsState, DescribeCosts, EngineState, InheritCosts
from coordinator.leadership import SOLE, Authority
from coordinator.observe.lines import replace_file
from coordinator.resources.looking import LOOK_EVERY_S, TIMEOUT_S, Looking
from hwprobe.cost import ModelSize, model_size
from hwprobe.costmodel import CostModel, CostState, CostStateRefused, decode_state, encode_state
from hwprobe.mapping import CHANGE, Proposal, TaskMapping, View, describe, difference

log = logging.getLogger(__name__)

KEEP_EVERY_S = 20.0
COST_FILE = "cost.json"


class Mapper(Looking):
    """See the module docstring. ``file``: where the cost model is kept; ``declared``: the job's classes."""

    def __init__(
        self,
        node: Node,
        proxy: Ref,
        mapping: TaskMapping,
        *,
        declared: Mapping[str, str],
        file: Path,
        say: Callable[[str], None],
        authority: Authority = SOLE,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        super().__init__(node, proxy, look_every_s)
        self._mapping = mapping
        self._declared = dict(declared)
        self._file = file
        self._say = say
        self._authority = authority
        self._kept_at: float | None = None
        self._last: tuple[CostsState, float] | None = None  # what the proxy said, and when
        self._legacy: tuple[CostsState, float] | None = None  # likewise the one before, until its successor has it

    async def run(self) -> None:
        try:
            await super().run()
        finally:  # by cancellation: the end of the run
            if self._last is not None:
                self._write(self._last[0].state)

    def follow(self, proxy: Ref) -> None:
        """Another one from now on, which begins with what this one has said last."""
        super().follow(proxy)
        self._legacy = self._legacy or self._last

    async def _look(self, engines: Sequence[EngineState]) -> None:
        proxy = self._proxy
        if self._legacy is not None:
            await self._hand_over(proxy, *self._legacy)
        costs = await self._node.ask(proxy, DescribeCosts(), timeout_s=TIMEOUT_S)
        if self._proxy is not proxy:  # meanwhile: what was decided from this would be another's
            return
        self._last = costs, asyncio.get_running_loop().time()
        self._keep(costs.state)
        view = View(engines=pools(engines), declared=self._declared, current=costs.shares, in_flight=costs.in_flight)
        proposal = await self._mapping.propose(CostModel(costs.state), view)
        if difference(proposal.shares, costs.shares) <= CHANGE or costs.held_s > 0:
            return
        if not self._authority.leads():
            log.warning("the mapping stays as it is: it is uncertain whether this process leads")
            return
        await self._order(proxy, proposal)

    async def _hand_over(self, proxy: Ref, costs: CostsState, at: float) -> None:
        age_s = asyncio.get_running_loop().time() - at
        inherited = await self._node.ask(proxy, InheritCosts(costs, age_s), timeout_s=TIMEOUT_S, retries=2)
        if self._proxy is proxy:
            self._legacy = None
        if inherited.taken and costs.shares:
            self._say(f"the proxy's successor goes on with mapping {costs.number}: {describe(costs.shares)}")

    async def _order(self, proxy: Ref, proposal: Proposal) -> None:
        order = Assign(proposal.shares, proposal.by, proposal.why)
        assigned = await self._node.ask(proxy, order, timeout_s=TIMEOUT_S, retries=2)
        if assigned.refused:
            log.info("the mapping stays as it is: %s", assigned.refused)
        else:
            self._say(f"mapping {assigned.number} ({proposal.by}): {describe(proposal.shares)}: {proposal.why}")

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
