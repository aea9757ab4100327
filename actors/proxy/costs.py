"""What the proxy knows of costs, and which hardware class it sends a task to.

Invariant: the cost model is fed with every request and every engine's report, whatever the mapping is; shares that were
ordered hold until the next order, and each order can be taken back, in the reverse of the order in which they came. A
proxy's successor begins with all of it: what was learned, the shares, the orders, a person's hold, and the classes that
tasks were moved to.

A new trajectory goes to the class that is furthest behind its share of the task's trajectories; it stays there with its
prefix as long as the class has a share of the task at all. Tasks without shares go to the class that is declared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec

from actors.proxy.engines.protocol import GenerateRequest
from actors.proxy.messages import Assign, Assigned, CostsState, MappingOrder
from actors.proxy.routing import Apportionment, Need, preferred_class
from hwprobe.costmodel import CostModel, Rates
from hwprobe.fitting import Work

REMEMBERED = 50
"""Orders that can be taken back."""
HELD_S = 600.0
"""How long nothing but a person changes the mapping, once a person has taken an order back."""


class Costs:
    """See the module docstring. Times are handed in."""

    def __init__(self, model: CostModel, affinity: Mapping[str, str]) -> None:
        self._model = model
        self.rates: Callable[[str], Rates] = model.rates
        self._affinity = dict(affinity)
        self._apportionment = Apportionment()
        self._orders: list[MappingOrder] = []
        self._number = 0
        self._held_until = float("-inf")
        self._inherited = False

    # ---- what happens --------------------------------------------------------------------------------------------

    def asked(self, task: str, trajectory: str, prompt: float, now: float, turn: int | None = None) -> None:
        self._model.demand.asked(task, trajectory, prompt, now, turn)

    def answered(self, trajectory: str, sampled: float, now: float) -> None:
        self._model.demand.answered(trajectory, sampled, now)

    def unanswered(self, trajectory: str) -> None:
        self._model.demand.unanswered(trajectory)

    def ended(self, trajectory: str, *, whole: bool = True) -> None:
        self._model.demand.ended(trajectory, whole=whole)

    def worked(self, hardware_class: str, work: Work) -> None:
        self._model.worked(hardware_class, work)

    # ---- where to ------------------------------------------------------------------------------------------------

    def need(self, task: str, request: GenerateRequest) -> Need:
        """Until a task is known, it is taken to sample all that it may."""
        begun = 0 if request.begun is None else len(request.begun.tokens)
        most = request.max_tokens - begun
        fit = self._model.demand.tasks.get(task)
        expected = most if fit is None or not fit.known else min(most, fit.response - begun)
        return Need(len(request.prompt) + begun, max(1.0, expected))

    def preferred(self, task: str, holder: str | None, serving: Collection[str]) -> str | None:
        """The class for a turn; ``holder``: the class of the engine that has the prefix, ``serving``: classes that it
        may go to."""
        if self._apportionment.knows(task):
            return self._apportionment.pick(task, holder, serving)
        return preferred_class(self._affinity, task)

    def prefer(self, task: str, hardware_class: str) -> None:
        self._affinity[task] = hardware_class

    # ---- orders --------------------------------------------------------------------------------------------------

    def assign(self, order: Assign, now: float) -> Assigned:
        if now < self._held_until:
            why = f"a person took the last order back; nothing changes for another {self._held_until - now:.0f} s"
            return Assigned(self._number, self._apportionment.shares, refused=why)
        self._number += 1
        done = MappingOrder(
            number=self._number,
            by=order.by,
            why=order.why,
            before=self._apportionment.shares,
            after=order.shares,
            at_s=now,
        )
        self._orders = [*self._orders, done][-REMEMBERED:]
        self._apportionment.order(order.shares)
        return Assigned(self._number, order.shares)

    def undo(self, now: float) -> Assigned:
        """Raises ``ValueError`` where there is nothing to take back."""
        if not self._orders:
            raise ValueError("no order for the mapping is left to be taken back")
        last = self._orders.pop()
        self._held_until = now + HELD_S
        self._apportionment.order(last.before)
        return Assigned(last.number, last.before)

    def describe(self, now: float) -> CostsState:
        return CostsState(
            state=self._model.state(),
            shares=self._apportionment.shares,
            orders=self._orders,
            in_flight=len(self._model.demand),
            held_s=max(0.0, self._held_until - now),
            now_s=now,
            number=self._number,
            preferred=dict(self._affinity),
        )

    def inherit(self, costs: CostsState, age_s: float, now: float) -> bool:
        """Go on from what another proxy described so long ago; its clock was another. Once, and before any order."""
        if self._inherited or self._number:
            return False
        self._inherited = True
        ahead_s = now - (costs.now_s + age_s)
        self._orders = [msgspec.structs.replace(order, at_s=order.at_s + ahead_s) for order in costs.orders]
        self._number = costs.number
        if costs.held_s > age_s:
            self._held_until = now + costs.held_s - age_s
        self._affinity |= costs.preferred
        self._apportionment.order(costs.shares)
        self._model.inherit(costs.state)
        return True
