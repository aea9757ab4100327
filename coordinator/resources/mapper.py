"""Decides again and again which hardware class plays which task, and tells the proxy: see ``hwprobe.mapping``.

    engines --Served(work), requests--> proxy's cost model --CostsState--> mapping.propose --Assign--> proxy

Invariant: the decision is the mapping's alone, from the cost model that the proxy has; an order says by whom and why,
the proxy keeps it, and a person can take it back (``UndoMapping``), after which nothing is ordered for a while. A proxy
that does not answer costs one look. What the model knows is kept in the run directory (``cost.json``), for the planner
and for a run that goes on.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from actors.core import Node, Ref
from actors.proxy.messages import Assign, DescribeCosts, EngineState
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

    async def _look(self, engines: Sequence[EngineState]) -> None:
        costs = await self._node.ask(self._proxy, DescribeCosts(), timeout_s=TIMEOUT_S)
        self._keep(costs.state)
        view = View(engines=pools(engines), declared=self._declared, current=costs.shares, in_flight=costs.in_flight)
        proposal = await self._mapping.propose(CostModel(costs.state), view)
        if difference(proposal.shares, costs.shares) <= CHANGE or costs.held_s > 0:
            return
        if not self._authority.leads():
            log.warning("the mapping stays as it is: it is uncertain whether this process leads")
            return
        await self._order(proposal)

    async def _order(self, proposal: Proposal) -> None:
        order = Assign(proposal.shares, proposal.by, proposal.why)
        assigned = await self._node.ask(self._proxy, order, timeout_s=TIMEOUT_S, retries=2)
        if assigned.refused:
            log.info("the mapping stays as it is: %s", assigned.refused)
        else:
            self._say(f"mapping {assigned.number} ({proposal.by}): {describe(proposal.shares)}: {proposal.why}")

    def _keep(self, state: CostState) -> None:
        now = asyncio.get_running_loop().time()
        if self._kept_at is None:
            self._kept_at = now
        if now - self._kept_at < KEEP_EVERY_S or not state.tasks:
            return
        self._kept_at = now
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
