"""Moves tasks between the pools of engines as their load shifts: looks at the proxies, decides, tells them.

Invariant: the decision is ``rebinding.decide``'s alone; a proxy that does not answer is asked again, and the run goes
on as it was. Only tasks with a declared class are moved: others go to the least loaded engine anyway.

Of several proxies each has the trajectories that are placed there, by the declared classes, and can move them between
its own pools alone: that is one decision for each, from its own engines' load.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from actors.core import Node, Ref
from actors.proxy.messages import Acknowledged, EngineState, Prefer
from actors.proxy.routing import preferred_class
from bus.message import BusError
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
        self._states: dict[Ref, State] = {}  # of each proxy that there is

    async def _look(self, engines: Sequence[EngineState]) -> None:
        there = self._engines.proxies
        self._states = {proxy: state for proxy, state in self._states.items() if proxy in there.values()}
        for name, proxy in there.items():
            of_proxy = [engine for engine in engines if engine.proxy == name]
            if len({engine.hardware_class for engine in of_proxy if engine.state != "removed"}) > 1:
                await self._even_out(name, proxy, of_proxy)

    async def _even_out(self, name: str, proxy: Ref, engines: Sequence[EngineState]) -> None:
        before, pools = self._states.get(proxy, State({})), pool_loads(engines)
        tasks = dict(before.tasks)
        for task in (task for pool in pools.values() for task in pool.in_flight):
            declared = preferred_class(self._affinity, task)
            if declared is not None and task not in tasks:
                tasks[task] = Task(declared, declared)
        known = State(tasks, before.high_since_s, before.low_since_s)
        after, move = decide(known, pools, asyncio.get_running_loop().time(), self._marks)
        if move is not None:
            order = Prefer(move.task, move.to)
            try:
                await self._node.ask(proxy, order, Acknowledged, timeout_s=TIMEOUT_S, retries=2)
            except BusError as error:  # the others are looked at all the same, and this one again
                log.info("proxy %s was not told that %s goes to %s: %s", name, move.task, move.to, error)
                return
            at = f" at {name}" if len(self._engines.proxies) > 1 else ""
            self._say(f"{move.task} goes to {move.to} instead of {move.origin}{at}: {move.reason}")
        self._states[proxy] = after
