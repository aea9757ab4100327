"""Which hardware class plays which task: as declared, or as the cost that was observed says.

Invariant: a mapping only proposes. What it proposes names known tasks and classes that serve, each task's shares add up
to 1, and it says what rate the cost model expects of it; who asked decides whether it takes effect, and can take it
back.

    declared   the class that the user named for a task; the others go wherever there is room
    learned    from the declared classes on: the division of the tasks with the highest rate of the network of engines
               (``flow``) at what the classes reach and what the tasks are like (``costmodel``). It replaces what holds
               only for a gain of ``GAIN``, so that noise moves nothing
    advised    proposals of a language model, checked against that (``advice``)

A task that little is known of yet keeps its declared class. A class that has not said anything in ``QUIET`` decisions
between which others have (because nothing is sent there) gets ``PROBE`` of the task that loses least by it, until it
has: a roofline that was too low, or a device that was throttled and is not any more, would never be found out
otherwise.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from hwprobe.costmodel import CostModel
from hwprobe.flow import Network, Shares, is_finite

GAIN = 0.02
"""By which a division must be better than the one that holds."""
SIMPLER = 0.015
"""What a task on one class may cost beside one on two: the network knows nothing of chance, nor of prefixes that change
places."""
QUIET = 60
HEARD = 5
"""Reports that end a probe."""
PROBE = 0.05
ROUNDED = 1e-3
"""Shares below this are none: they would only keep prefixes on two classes."""
CHANGE = 0.01
"""A part of a task below which a division is the one that holds."""
Divided = dict[str, dict[str, float]]


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision is about."""

    engines: dict[str, tuple[int, int]]  # class -> engines that serve, places in the batch of each
    declared: dict[str, str]  # task, or "default" -> class
    current: Divided  # the shares that hold; a task that is missing goes where it is declared
    in_flight: int  # trajectories


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of every task that is decided about; others stay as declared."""

    shares: Divided
    by: str  # declared, learned, advised
    expected: float = 0.0  # trajectories a second; 0: nobody worked it out
    before: float = 0.0  # likewise, of what holds now
    why: str = ""


class TaskMapping(Protocol):
    """A way to decide."""

    async def propose(self, model: CostModel, view: View) -> Proposal:
        """What should hold from now on: ``view.current`` where nothing else is better. Never waits for long."""


class Declared:
    """As the user says."""

    async def propose(self, model: CostModel, view: View) -> Proposal:
        return Proposal(shares={}, by="declared")


class Learned:
    """See the module docstring. Remembers between decisions only which classes have fallen silent."""

    def __init__(self) -> None:
        self._reports: dict[str, int] = {}
        self._quiet: dict[str, int] = {}  # class -> decisions since its last report, of those with one of another
        self._heard: dict[str, int] = {}  # class that is probed -> reports it had when that began

    async def propose(self, model: CostModel, view: View) -> Proposal:
        return self.decide(model, view)

    def decide(self, model: CostModel, view: View) -> Proposal:
        network = network_of(model, view)
        if network is None:
            return Proposal(shares=view.current, by="learned", why="there is nothing to choose between")
        held = holding(view, network)
        before = network.rate(held)
        best, expected = simplest(network, *network.divided(held))
        probed = self._probed(model, network)
        better = before <= 0 or expected > before * (1 + GAIN) or _lost(view, network)
        if not better and not probed:
            return Proposal(
                shares=view.current, by="learned", expected=before, before=before, why="what holds is as good"
            )
        shares = with_probes(network, cleaned(best) if better else held, probed)
        rate = network.rate(shares)
        why = f"{rate:.3g} trajectories/s by the cost model, {before:.3g} as it was"
        if probed:
            why += f"; {', '.join(probed)} has not been heard of"
        return Proposal(shares=shares, by="learned", expected=rate, before=before, why=why)

    def _probed(self, model: CostModel, network: Network) -> list[str]:
        """Classes that nothing was heard of for too long, until they have told enough."""
        reported = {name: model.fit(name).reports for name in network.pools}
        heard = {name for name, reports in reported.items() if reports != self._reports.get(name)}
        self._reports |= reported
        for name, reports in reported.items():
            if name in heard:
                self._quiet[name] = 0
            elif heard:  # while nobody plays, silence says nothing
                self._quiet[name] += 1
            if self._quiet[name] >= QUIET:
                self._heard.setdefault(name, reports)
            if name in self._heard and reports - self._heard[name] >= HEARD:
                del self._heard[name]
        return sorted(name for name in self._heard if name in network.pools)


def simplest(network: Network, best: Divided, rate: float) -> tuple[Divided, float]:
    """The same with fewer tasks on several classes, one after the other, as long as that costs little."""
    shares, least, now = best, rate * (1 - SIMPLER), rate
    for task, of_task in best.items():
        most = max(of_task, key=of_task.__getitem__)
        whole = {**shares, task: {name: float(name == most) for name in of_task}}
        if (found := network.rate(whole)) >= least:
            shares, now = whole, found
    return shares, now


def network_of(model: CostModel, view: View) -> Network | None:
    """The tasks that are known, on the engines that serve; None where there is nothing to choose between."""
    engines = {name: view.engines[name] for name in sorted(view.engines) if view.engines[name][0]}
    network = model.network(engines, view.in_flight)
    return network if len(engines) > 1 and network.tasks else None


def holding(view: View, network: Network) -> Divided:
    """Where each task goes now: as decided, as declared, or in proportion to the engines, as requests without a class
    go. What is left of shares of a class that serves no more is spread over the others."""
    everything = sum(pool.engines for pool in network.pools.values())
    even = {name: pool.engines / everything for name, pool in network.pools.items()}
    result = {}
    for task in network.tasks:
        declared = view.declared.get(task, view.declared.get("default"))
        wanted = view.current.get(task) or ({declared: 1.0} if declared is not None else even)
        there = {name: wanted.get(name, 0.0) for name in network.pools}
        total = sum(there.values())
        result[task] = {name: share / total for name, share in there.items()} if total > 0 else even
    return result


def cleaned(shares: Shares) -> Divided:
    """Without shares that are next to nothing, to four digits."""
    result = {}
    for task, of_task in shares.items():
        kept = {name: share if share >= ROUNDED else 0.0 for name, share in of_task.items()}
        total = sum(kept.values())
        rounded = {name: round(share / total, 4) for name, share in kept.items()}
        most = max(rounded, key=rounded.__getitem__)
        rounded[most] += 1.0 - sum(rounded.values())
        result[task] = rounded
    return result


def difference(one: Shares, other: Shares) -> float:
    """The largest part of a task that would go elsewhere."""
    parts = [
        abs(one.get(task, {}).get(name, 0.0) - other.get(task, {}).get(name, 0.0))
        for task in {*one, *other}
        for name in {*one.get(task, {}), *other.get(task, {})}
    ]
    return max(parts, default=0.0)


def why_not(shares: Shares, network: Network) -> str:
    """What is wrong with shares that somebody proposes; "" where nothing is."""
    unknown = sorted(set(shares) - set(network.tasks))
    if unknown:
        return f"expected the tasks {', '.join(network.tasks)}, found {', '.join(unknown)}"
    missing = sorted(set(network.tasks) - set(shares))
    if missing:
        return f"no shares for {', '.join(missing)}"
    strange = sorted({name for of_task in shares.values() for name in of_task} - set(network.pools))
    if strange:
        return f"expected the classes {', '.join(network.pools)}, found {', '.join(strange)}"
    if not is_finite(shares):
        return "expected shares from 0 to 1 that add up to 1 for each task"
    return ""


def describe(shares: Shares) -> str:
    """For people: games to H800, math to H20 75% and H800 25%."""
    lines = []
    for task, of_task in sorted(shares.items()):
        there = {name: share for name, share in sorted(of_task.items(), key=lambda pair: -pair[1]) if share > 0}
        parts = [name if len(there) == 1 else f"{name} {100 * share:.0f}%" for name, share in there.items()]
        lines.append(f"{task} to {' and '.join(parts)}")
    return ", ".join(lines)


def _lost(view: View, network: Network) -> bool:
    """Whether a class that something goes to serves no more."""
    return any(share > 0 and name not in network.pools for of in view.current.values() for name, share in of.items())


def with_probes(network: Network, shares: Divided, probed: list[str]) -> Divided:
    """``PROBE`` of one task to each of these classes, of the one that loses least by it."""
    result = shares
    for name in probed:
        if any(of_task[name] >= PROBE for of_task in result.values()):
            continue
        moved = [
            {**result, task: {other: share * (1 - PROBE) + PROBE * (other == name) for other, share in of.items()}}
            for task, of in result.items()
        ]
        result = cleaned(max(moved, key=network.rate))
    return result
