"""Where a request goes: to the engine where it, and others because of it, are expected to wait least.

    answered after  =  what is ahead of it there            (what is left of the work of every request in flight)
                     + tokens to be computed x s/token      (prompt, less what the engine has of it from before)
                     + tokens to be sampled x s/step        (by the task's mean; in a batch as is usual there)
    its work        =  the second line + its share of the third: what it takes of the engine's time
    others wait     =  its work x how many there are        (what is ahead, in requests of the mean work there)

Without the last line each request would do what is best for itself: under load, prefixes would be computed anew on
engines that are only a little less busy, at everybody's expense.

Seconds come of the cost model (``hwprobe.costmodel``), which knows what each class reaches of its arithmetic and
bandwidth. The class that is declared or ordered for a task is a prior: an engine of another class is taken

- where none of that class may take the request (``gone``), or each is full, that is, without a place or without room
  for keys and values, while another one is not (``full``);
- where all that is expected to take ``OTHER_CLASS`` times as little (``busy``), or it has the prefix and that is so
  (``prefix``).

Invariant: a request never waits for a class while an engine of another one serves and has room. It may wait for the
engine that has its prefix, where that is expected to cost less than to compute the prefix anew elsewhere. The decision
is that of a scan over all engines, in whole nanoseconds; only the least loaded one of each group (``pool``) and the
one with the prefix have to be looked at, because all other terms are the same within a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from actors.proxy.entry import Claim, EngineEntry
from actors.proxy.pool import Group
from hwprobe.costmodel import Rates

OTHER_CLASS = 2
"""How many times as little all that has to be at an engine of another class than at any of the preferred one."""
NS = 1e9


class Need(msgspec.Struct, frozen=True, gc=False):
    """What one request asks of an engine."""

    prompt: int  # tokens
    sampled: float  # tokens that are expected to be sampled

    def delay_ns(self, ahead: int, group: Group, rates: Rates, cached: int) -> int:
        """Until it is answered by an engine of this group with so much ahead, and what others wait there because of it.
        At least the last token of the prompt is computed, whatever is cached."""
        prompt, sampled = self.prompt, self.sampled
        fresh = prompt - cached
        prefill_s = (fresh if fresh > 1 else 1) * rates.token_s
        decode_s = sampled * rates.step_s(group.batch, prompt + sampled / 2)
        work = int((prefill_s + decode_s / group.batch) * NS)
        return ahead + ahead * work // (group.mean or work or 1) + int((prefill_s + decode_s) * NS)

    def claim(self, rates: Rates, cached: int, places: int) -> Claim:
        """What it takes of an engine's time, which others do not have."""
        step_s = rates.step_s(places, self.prompt + self.sampled / 2)
        return Claim(
            prefill_ns=int(max(1, self.prompt - cached) * rates.token_s * NS),
            decode_ns=int(self.sampled * step_s * NS) // places,
            sampled=math.ceil(self.sampled),
            length=self.prompt + math.ceil(self.sampled),
        )


class Choice(msgspec.Struct, frozen=True, gc=False):
    """A decision, and why it is not the preferred class: gone, full, busy, prefix; "": it is, or there is none."""

    engine: EngineEntry
    fallback: str = ""


def preferred_class(affinity: Mapping[str, str], domain: str) -> str | None:
    """The hardware class that a job declares for a domain, or for the rest under "default"."""
    return affinity.get(domain, affinity.get("default"))


def choose(
    groups: Sequence[Group],
    need: Need,
    rates: Callable[[str], Rates],
    *,
    preferred: str | None = None,
    holder: EngineEntry | None = None,
    cached: int = 0,
    barred: str | None = None,
) -> Choice | None:
    """Among the engines of these groups; None where there is none. ``holder`` has ``cached`` tokens of the prompt;
    ``barred`` is taken where there is no other."""
    best: tuple[bool, int, str] | None = None
    taken: EngineEntry | None = None
    suited = room = preferred is None  # whether there is one of that class, and one with room
    held: int | None = None  # what it would be at the holder
    holds = None if holder is None else holder.kind
    for group in groups:
        least = group.least(barred)
        if least is None:
            continue
        full, ahead, name, _, engine = least
        of_class = rates(group.hardware_class)
        weight = 1
        if preferred is not None:
            if group.hardware_class == preferred:
                suited, room = True, room or not full
            else:
                weight = OTHER_CLASS
        found = (full, weight * need.delay_ns(ahead, group, of_class, 0), name)
        if best is None or found < best:
            best, taken = found, engine
        if holder is not None and group.kind == holds:
            held = weight * need.delay_ns(holder.ahead, group, of_class, cached)
    if best is None or taken is None:
        if barred is None:
            return None
        return choose(groups, need, rates, preferred=preferred, holder=holder, cached=cached)
    if holder is not None and held is not None and holder.name != barred:
        # A place elsewhere counts only for a request whose prefix is not here: the estimate says which is sooner.
        mine = (holder.full and best[0], held, holder.name)
        taken = holder if mine <= best else taken
    if preferred is None or taken.hardware_class == preferred:
        return Choice(taken)
    return Choice(taken, "gone" if not suited else "prefix" if taken is holder else "busy" if room else "full")


class Apportionment:
    """Divides a task's trajectories between hardware classes: each new one goes to the class that is furthest behind
    its share, so that shares hold over every stretch and not only on average."""

    def __init__(self) -> None:
        self.shares: dict[str, dict[str, float]] = {}
        self._owed: dict[str, dict[str, float]] = {}

    def order(self, shares: Mapping[str, Mapping[str, float]]) -> None:
        """These hold from now on; what a task is owed so far is forgotten where its shares change."""
        after = {task: dict(of_task) for task, of_task in shares.items()}
        same = {task for task, of_task in after.items() if self.shares.get(task) == of_task}
        self._owed = {task: owed for task, owed in self._owed.items() if task in same}
        self.shares = after

    def knows(self, task: str) -> bool:
        return task in self.shares

    def pick(self, task: str, holder: str | None, serving: Collection[str]) -> str | None:
        """The class of one that is known; None where none of those that have a share serves. ``holder``: the class
        that has the trajectory's prefix, which keeps it as long as it has a share."""
        able = {name: share for name, share in self.shares[task].items() if share > 0 and name in serving}
        if holder in able or not able:
            return holder if holder in able else None
        owed = self._owed.setdefault(task, {})
        for name, share in able.items():
            owed[name] = owed.get(name, 0.0) + share
        chosen = max(able, key=lambda name: (owed[name], name))
        owed[chosen] -= sum(able.values())
        return chosen
