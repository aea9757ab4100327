"""Watches how loaded the engines are, and orders their proxy to move trajectories off those that are too busy.

    engine --Served(load), once a second--> proxy <--DescribeProxy-- this --readings--> hotspots.decide
                                              ^                                              |
                                              +------------- MoveTrajectories <--------------+

Invariants:

- the decision is ``hotspots``' alone. What it needs to remember beyond this process's life (who gave, who took, how
  long ago) comes back from the proxy, so a new leader moves nothing back that the old one has just moved;
- an order leaves only while this process is certain to lead; one that was on its way all the same is refused by the
  bus, as any word of an older epoch is;
- a load that is not known (telemetry that fell silent, an engine that is swapping) is no reading: such an engine is
  neither hot nor a target.

Each proxy's engines are evened out by themselves: a trajectory stays with its proxy, and new ones are placed by the
places that serve. Engines on one GPU count as one: nothing is won by moving between them. Where the job declares which
class a task goes to, each class is evened out by itself, because moving tasks between classes is
``coordinator.resources.rebinder``'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from actors.core import Node
from actors.proxy.messages import EngineState, MoveTrajectories, Moving
from coordinator.engines import Engines
from coordinator.leadership import SOLE, Authority
from coordinator.resources.looking import LOOK_EVERY_S, TIMEOUT_S, Looking
from coordinator.scheduling.hotspots import SILENT_S, HotSpots, Migration, Reading

log = logging.getLogger(__name__)

SMOOTH_S = 10.0
"""A reading is the mean of what was told in so many seconds: a GPU that is full has idle moments all the same, between
two steps or two requests, and its driver's samples are shorter than a second. After a move the mean begins anew."""
RETRIES = 2

Key = tuple[str, str]
Devices = Mapping[str, Sequence[EngineState]]
"""Device (or the engine itself, where it has none) -> the engines on it."""


class HotWatch(Looking):
    """See the module docstring. ``apart``: hardware classes are evened out each by itself; ``say`` tells people."""

    def __init__(
        self,
        node: Node,
        engines: Engines,
        *,
        apart: bool,
        say: Callable[[str], None],
        authority: Authority = SOLE,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        super().__init__(node, engines, look_every_s)
        self._apart = apart
        self._say = say
        self._authority = authority
        self._spots: dict[Key, HotSpots] = {}  # by proxy and hardware class, or under "" for all classes
        self._known: dict[Key, set[str]] = {}  # likewise: devices
        self._stuck: dict[str, str] = {}
        self._told: dict[str, deque[tuple[float, float]]] = {}  # device -> when, and its load

    async def _look(self, engines: Sequence[EngineState]) -> None:
        if sum(engine.state != "removed" for engine in engines) < 2:
            return
        now = asyncio.get_running_loop().time()
        stuck: dict[str, str] = {}
        for key, devices in self._groups(engines).items():
            spots = self._spots.setdefault(key, HotSpots())
            for gone in self._known.get(key, set()) - set(devices):
                spots.forget(gone)
                self._told.pop(gone, None)
            self._known[key] = set(devices)
            readings = (self._reading(now, name, on_it) for name, on_it in devices.items())
            spots.note(reading for reading in readings if reading is not None)
            for name, on_it in devices.items():
                spots.remember(name, gave_at=_at(now, on_it, "gave_s"), took_at=_at(now, on_it, "took_s"))
            for migration in spots.decide(now):
                self._told.pop(migration.source, None)
                self._told.pop(migration.target, None)
                await self._order(migration, devices)
            stuck |= spots.stuck
        for name, why in stuck.items():
            if name not in self._stuck:
                log.info("%s is too busy, and nothing is moved: %s", name, why)
        self._stuck = stuck

    def _groups(self, engines: Iterable[EngineState]) -> dict[Key, dict[str, list[EngineState]]]:
        groups: dict[Key, dict[str, list[EngineState]]] = {key: {} for key in self._spots}
        for engine in engines:
            if engine.state in ("serving", "suspended"):
                group = groups.setdefault((engine.proxy, engine.hardware_class if self._apart else ""), {})
                group.setdefault(_device(engine), []).append(engine)
        return groups

    def _reading(self, now: float, device: str, engines: Sequence[EngineState]) -> Reading | None:
        """Of those on one device that report; nothing where none does, or one is not serving at the moment."""
        loads = [
            (engine.load_age_s, engine.load.load)
            for engine in engines
            if engine.load is not None and engine.load.load is not None and engine.load_age_s <= SILENT_S
        ]
        if not loads or any(engine.state != "serving" for engine in engines):
            return None
        age_s, load = min(loads)
        told = self._told.setdefault(device, deque())
        told.append((now - age_s, load))
        while told[0][0] < now - age_s - SMOOTH_S:
            told.popleft()
        mean = sum(load for _, load in told) / len(told)
        trajectories = sum(engine.trajectories for engine in engines)
        return Reading(device, engines[0].hardware_class, now - age_s, mean, trajectories)

    async def _order(self, migration: Migration, devices: Devices) -> None:
        proxy = self._engines.proxy_of(devices[migration.source][0])
        for order in _orders(migration, devices):
            if not self._authority.leads():
                log.warning("nothing is moved from %s: it is uncertain whether this process leads", order.source)
                return
            moving = await self._node.ask(proxy, order, Moving, timeout_s=TIMEOUT_S, retries=RETRIES)
            if moving.refused:
                log.info("nothing is moved from %s to %s: %s", order.source, order.target, moving.refused)
            else:
                self._say(f"{order.trajectories} trajectories go from {order.source} to {order.target}: {order.why}")


def _device(engine: EngineState) -> str:
    load = engine.load
    if load is None or load.figure != "gpu_utilisation" or not load.devices:
        return engine.name
    return ",".join(load.devices)


def _at(now: float, engines: Sequence[EngineState], ago: str) -> float | None:
    """When one of them last gave, or took."""
    seconds = [value for engine in engines if (value := getattr(engine, ago)) is not None]
    return now - min(seconds) if seconds else None


def _orders(migration: Migration, devices: Devices) -> Iterator[MoveTrajectories]:
    """From the engines on the source with most trajectories, to the one on the target with the fewest requests."""
    target = min(devices[migration.target], key=lambda engine: (engine.in_flight, engine.name))
    left = migration.trajectories
    for engine in sorted(devices[migration.source], key=lambda engine: (-engine.trajectories, engine.name)):
        count = min(left, engine.trajectories)
        if count:
            figure = "" if engine.load is None else f" ({engine.load.figure.replace('_', ' ')})"
            yield MoveTrajectories(engine.name, target.name, count, migration.why + figure)
            left -= count
