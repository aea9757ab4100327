"""Looks at the threads of the traced processes, again and again.

Invariant: looking takes at most ``MOST_COST`` of one core: with many threads the looks become rarer, never the figures
wrong. Counters are differences between a thread's first and last look (from its creation on, if that came later), so
what was counted in between is exact however rare the looks; only what is seen *at* a look is a sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from hwprobe.tracing.children import Interruption
from hwprobe.tracing.targets import Targets
from hwprobe.tracing.threads import ThreadFacts, read_thread, threads_of

MOST_COST = 0.05
REFRESH_S = 1.0  # how often children are looked for

Visit = Callable[[ThreadFacts, int], None]
"""Called for each thread at each look, with the nanoseconds since it was last looked at."""


class ThreadSpan(msgspec.Struct, frozen=True):
    """What one thread did between its first and its last look."""

    facts: ThreadFacts  # at the last look
    wall_ns: int
    run_ns: int
    wait_ns: int  # could run, and waited for a CPU
    slices: int
    minor_faults: int
    major_faults: int

    @property
    def blocked_ns(self) -> int:
        """Neither on a CPU nor waiting for one."""
        return max(0, self.wall_ns - self.run_ns - self.wait_ns)


class Gathered(msgspec.Struct, frozen=True):
    """How the looking went."""

    seconds: float
    looks: int
    interrupted: bool
    all_ended: bool  # every traced process

    def notes(self) -> tuple[str, ...]:
        early = ("all traced processes have ended",) if self.all_ended else ()
        return (*early, "interrupted") if self.interrupted else early


class _Seen(msgspec.Struct):
    first: ThreadFacts
    first_ns: int
    last: ThreadFacts
    last_ns: int


class Looks:
    """See the module docstring."""

    def __init__(self, targets: Targets, visit: Visit | None = None, proc: Path = Path("/proc")) -> None:
        self._targets = targets
        self._visit = visit
        self._proc = proc
        self._seen: dict[tuple[int, int, float], _Seen] = {}
        self._pids = targets.look()
        self._refreshed = now_ns()
        self.processes: set[int] = set(self._pids)
        self.count = 0
        self.alive = True

    def look(self) -> None:
        """Look at every thread once."""
        if now_ns() - self._refreshed >= REFRESH_S * 1e9:
            self._pids = self._targets.look()
            self.processes.update(self._pids)
            self._refreshed = now_ns()
        alive = False
        for pid in self._pids:
            for tid in threads_of(pid, self._proc):
                facts = read_thread(pid, tid, self._proc)
                if facts is not None:
                    alive = True
                    self._note(facts)
        self.alive = alive
        self.count += 1

    def _note(self, facts: ThreadFacts) -> None:
        key, at = (facts.pid, facts.tid, facts.started_s), now_ns()
        seen = self._seen.get(key)
        if seen is None:
            first, since = (facts, at) if self.count == 0 else _newborn(facts)
            self._seen[key] = _Seen(first, since, facts, at)
            passed = at - since
        else:
            passed = at - seen.last_ns
            seen.last, seen.last_ns = facts, at
        if self._visit is not None:
            self._visit(facts, passed)

    def spans(self) -> list[ThreadSpan]:
        """Of all threads that were seen."""
        return [
            ThreadSpan(
                seen.last,
                seen.last_ns - seen.first_ns,
                seen.last.run_ns - seen.first.run_ns,
                seen.last.wait_ns - seen.first.wait_ns,
                seen.last.slices - seen.first.slices,
                seen.last.minor_faults - seen.first.minor_faults,
                seen.last.major_faults - seen.first.major_faults,
            )
            for seen in self._seen.values()
        ]

    def gather(
        self,
        seconds: float,
        rate_hz: float,
        interruption: Interruption,
        over: Callable[[], bool] = lambda: False,
        after: Callable[[], None] = lambda: None,
    ) -> Gathered:
        """Look ``rate_hz`` times a second for so long, until interrupted, until no process is left, or until ``over``.
        ``after`` is called after each look."""
        begin = time.monotonic()
        first, cost_s = self.count, 0.0
        while True:
            used = time.thread_time()
            self.look()
            after()
            cost_s = max(cost_s / 2, time.thread_time() - used)
            passed = time.monotonic() - begin
            if not self.alive or passed >= seconds or interruption.stopped or over():
                break
            pause = max(1 / rate_hz, cost_s / MOST_COST)
            if interruption.wait(min(pause, seconds - passed)):
                self.look()
                after()
                break
        return Gathered(
            time.monotonic() - begin, self.count - first, interruption.stopped, not self.alive and self._none_left()
        )

    def _none_left(self) -> bool:
        return not any((self._proc / str(pid)).exists() for pid in self._targets.look())


def now_ns() -> int:
    """The clock that threads' beginnings are told by."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _newborn(facts: ThreadFacts) -> tuple[ThreadFacts, int]:
    """A thread that began after the first look: all that it has counted falls into the time that is looked at."""
    zero = msgspec.structs.replace(facts, run_ns=0, wait_ns=0, slices=0, minor_faults=0, major_faults=0)
    return zero, int(facts.started_s * 1e9)
