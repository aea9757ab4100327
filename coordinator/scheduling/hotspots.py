"""When trajectories move from a GPU that has been too busy for too long to others that have room: decisions only.

Readings come in (whoever measures sends them), migrations come out (the proxy moves the trajectories, between two turns
or in the middle of one). Time is handed in with the readings.

    cool --(above HOT in every reading for HOT_FOR_S)--> hot --(migration)--> settling --(SETTLE_S)--> cool

Invariants, which together keep load from going to and fro:

- a GPU is hot only if all readings of the last ``HOT_FOR_S`` seconds are above ``HOT``, and those are fresh: one that
  has not been heard of for ``SILENT_S`` is neither hot nor a target;
- only GPUs below ``COOL`` receive, and none is given so much that it would come above ``FILL``, which is below ``HOT``:
  no migration makes another hot spot. Between ``COOL`` and ``HOT`` nothing happens (hysteresis);
- after a migration whoever gave or received is left alone for ``SETTLE_S`` and then judged by readings from after it;
  whoever received gives nothing for ``KEEP_S``, and whoever gave receives nothing for as long;
- a trajectory moves from the busiest source to the idlest target, as long as the target then is no busier than the
  source: it cannot overshoot by more than the estimate of what one trajectory costs is wrong.

Where every GPU is hot or no other one has room, nothing moves: ``stuck`` names it, for people and the planner.

What a trajectory costs is what all GPUs of a class do over the trajectories that they have, in the readings of the last
seconds. Saturated ones show less than is asked of them, and count only where there is no other to learn from.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable

import msgspec

HOT = 0.90
"""The brief's figure, of a GPU's time."""
HOT_FOR_S = 10.0
"""The brief's figure."""
COOL = 0.70
FILL = 0.80
SATURATED = 0.97
SILENT_S = 5.0
SETTLE_S = 8.0
"""A move takes a moment, or the trajectory's next turn where it asks for nothing just now; and readings are averages
over some seconds."""
KEEP_S = 60.0
ROUNDING = 1e-6


class Reading(msgspec.Struct, frozen=True):
    """One GPU's load."""

    gpu: str
    hardware_class: str
    at_s: float
    utilisation: float  # share of its time, 0 to 1
    trajectories: int  # that have their prefix there


class Migration(msgspec.Struct, frozen=True):
    """An order for the proxy."""

    source: str
    target: str
    trajectories: int  # how many; which ones is the proxy's business (the shortest prefixes are the cheapest to move)
    why: str


class _Gpu:
    def __init__(self, reading: Reading) -> None:
        self.readings: deque[Reading] = deque()
        self.last = reading
        self.quiet_until = -math.inf  # it is left alone
        self.keeps_until = -math.inf  # it has received
        self.gave_until = -math.inf

    def note(self, reading: Reading) -> None:
        self.last = reading
        if reading.at_s >= self.quiet_until:
            self.readings.append(reading)
        while len(self.readings) > 1 and self.readings[1].at_s <= reading.at_s - HOT_FOR_S:
            self.readings.popleft()

    @property
    def hot(self) -> bool:
        """Over the whole time, and without a gap in it."""
        readings = self.readings
        if len(readings) < 2 or self.last.utilisation <= HOT or self.last.at_s - readings[0].at_s < HOT_FOR_S:
            return False
        moments = [reading.at_s for reading in readings]
        gap = max(later - earlier for earlier, later in itertools.pairwise(moments))
        return gap <= SILENT_S and all(reading.utilisation > HOT for reading in readings)


class HotSpots:
    """See the module docstring."""

    def __init__(self) -> None:
        self._gpus: dict[str, _Gpu] = {}
        self._costs: dict[str, float] = {}  # of one trajectory by hardware class, in one decision
        self.stuck: dict[str, str] = {}  # hot GPUs that nothing can be done for, and why

    def note(self, readings: Iterable[Reading]) -> None:
        """One that is older than what is known of its GPU is left out."""
        for reading in readings:
            gpu = self._gpus.get(reading.gpu)
            if gpu is None:
                gpu = self._gpus[reading.gpu] = _Gpu(reading)
            if reading.at_s >= gpu.last.at_s:
                gpu.note(reading)

    def forget(self, gpu: str) -> None:
        """It is gone."""
        self._gpus.pop(gpu, None)
        self.stuck.pop(gpu, None)

    def remember(self, gpu: str, *, gave_at: float | None, took_at: float | None) -> None:
        """What somebody else has ordered, by the same rules: an earlier leader."""
        known = self._gpus.get(gpu)
        if known is None:
            return
        for at in (at for at in (gave_at, took_at) if at is not None):
            known.quiet_until = max(known.quiet_until, at + SETTLE_S)
        if gave_at is not None:
            known.gave_until = max(known.gave_until, gave_at + KEEP_S)
        if took_at is not None:
            known.keeps_until = max(known.keeps_until, took_at + KEEP_S)

    def decide(self, now: float) -> list[Migration]:
        """To be called after readings; what it returns is taken as ordered."""
        self.stuck = {}
        heard = {name: gpu for name, gpu in self._gpus.items() if now - gpu.last.at_s <= SILENT_S}
        hot = [name for name, gpu in heard.items() if gpu.hot and now >= max(gpu.quiet_until, gpu.keeps_until)]
        if not hot:
            return []
        self._costs = {}
        room = {
            name: self._demand(gpu)
            for name, gpu in heard.items()
            if gpu.last.utilisation < COOL and now >= max(gpu.quiet_until, gpu.gave_until)
        }
        if not room:
            self.stuck = dict.fromkeys(hot, f"no other GPU is below {COOL:.0%}")
            return []
        counts = self._spread({name: self._demand(heard[name]) for name in hot}, room)
        for name in hot:
            if not any(source == name for source, _ in counts):
                self.stuck[name] = "no other GPU has room for one trajectory more"
        return [self._move(source, target, count, now) for (source, target), count in counts.items()]

    def _spread(self, sources: dict[str, float], targets: dict[str, float]) -> Counter[tuple[str, str]]:
        """How many trajectories go from where to where; what is asked of each GPU is kept up on the way."""
        busiest = [(-demand, name) for name, demand in sources.items()]
        idlest = [(demand, name) for name, demand in targets.items()]
        costs = {name: self._cost(self._gpus[name]) for name in (*sources, *targets)}
        left = {name: self._gpus[name].last.trajectories for name in sources}
        heapq.heapify(busiest)
        heapq.heapify(idlest)
        counts: Counter[tuple[str, str]] = Counter()
        while busiest and idlest:
            (asked, source), (has, target) = busiest[0], idlest[0]
            after, then = -asked - costs[source], has + costs[target]
            if then > FILL + ROUNDING:  # a dearer class; the others may have room
                heapq.heappop(idlest)
            elif not left[source] or not costs[source] or then > after + ROUNDING:
                heapq.heappop(busiest)
            else:
                heapq.heapreplace(busiest, (-after, source))
                heapq.heapreplace(idlest, (then, target))
                left[source] -= 1
                counts[source, target] += 1
        return counts

    def _move(self, source: str, target: str, count: int, now: float) -> Migration:
        giver, taker = self._gpus[source], self._gpus[target]
        for gpu in (giver, taker):
            gpu.quiet_until = now + SETTLE_S
            gpu.readings.clear()
        giver.gave_until, taker.keeps_until = now + KEEP_S, now + KEEP_S
        why = (
            f"{source} was above {HOT:.0%} for {HOT_FOR_S:g} s, with {giver.last.trajectories} trajectories; {target} "
            f"is at {taker.last.utilisation:.0%} with {taker.last.trajectories}"
        )
        return Migration(source, target, count, why)

    def _demand(self, gpu: _Gpu) -> float:
        """What is asked of it, as a share of its time: above 1 where it is more than it has."""
        return max(gpu.last.utilisation, self._cost(gpu) * gpu.last.trajectories)

    def _cost(self, gpu: _Gpu) -> float:
        """Of one trajectory, as a share of such a GPU's time; 0 where nobody has any."""
        hardware_class = gpu.last.hardware_class
        if hardware_class not in self._costs:
            self._costs[hardware_class] = self._measured(hardware_class)
        return self._costs[hardware_class]

    def _measured(self, hardware_class: str) -> float:
        alike = [other for other in self._gpus.values() if other.last.hardware_class == hardware_class]
        for known in (alike, self._gpus.values()):
            seen = [reading for other in known for reading in (other.last, *other.readings)]
            for readings in ([reading for reading in seen if reading.utilisation < SATURATED], seen):
                trajectories = sum(reading.trajectories for reading in readings)
                if trajectories:
                    return sum(reading.utilisation for reading in readings if reading.trajectories) / trajectories
        return 0.0
