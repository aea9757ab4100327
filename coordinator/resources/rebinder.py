"""Moves tasks between the pools of engines as their load shifts: looks at the proxies, decides, tells them.

Invariant: the decision is ``rebinding.decide``'s alone; a proxy that does not answer is asked again, and the run goes
on as it was. Only tasks with a declared class are moved: others go to the least loaded engine anyway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from actors.core import Node
from actors.proxy.messages import Acknowledged, EngineState, Prefer
from actors.proxy.routing import preferred_class
from coordinator.engines import Engines
from coordinator.resources.looking import LOOK_EVERY_S, TIMEOUT_S, Looking
from coordinator.resources.rebinding import Marks, PoolLoad, State, Task, decide

log = logging.getLogger(__name__)


def pool_loads(engines: Iterable[EngineState]) -> dict[str, PoolLoad]:
    """Hardware class -> what its serving engines have in flight."""
    places: dict[str, int] = {}
    in_flight: dict[str, dict[str, int]] = {}
    for engine in engines:
        if engine.state == "serving":
            places[engine.hardware_class] = places.get(engine.hardware_class, 0) + engine.places
            tasks = in_flight.setdefault(engine.hardware_class, {})
            for task, requests in engine.by_domain.items():
                tasks[task] = tasks.get(task, 0) + requests
    return {name: PoolLoad(count, in_flight[name]) for name, count in places.items()}


class Rebinder(Looking):
    """See the module docstring. ``affinity``: the classes that the job declares for its tasks."""

    def __init__(
        self,
        node: Node,
        engines: Engines,
        affinity: Mapping[str, str],
        *,
        say: Callable[[str], None],
        marks: Marks | None = None,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        super().__init__(node, engines, look_every_s)
        self._affinity = affinity
        self._say = say
        self._marks = marks
        self._state = State({})

    async def _look(self, engines: Sequence[EngineState]) -> None:
        if len({engine.hardware_class for engine in engines if engine.state != "removed"}) < 2:
            return
        pools = pool_loads(engines)
        tasks = dict(self._state.tasks)
        for task in (task for pool in pools.values() for task in pool.in_flight):
            declared = preferred_class(self._affinity, task)
            if declared is not None and task not in tasks:
                tasks[task] = Task(declared, declared)
        known = State(tasks, self._state.high_since_s, self._state.low_since_s)
        after, move = decide(known, pools, asyncio.get_running_loop().time(), self._marks)
        if move is not None:
            order = Prefer(move.task, move.to)
            await self._engines.ask_each(order, Acknowledged, timeout_s=TIMEOUT_S, retries=2)
            self._say(f"{move.task} goes to {move.to} instead of {move.origin}: {move.reason}")
        self._state = after
