"""How many decisions the scheduler takes in a second while very many trajectories are live.

A decision is what is made of one outcome (stored or lost: the ledger, its journal on disk, the group, the batch) or the
start of one ticket (which of those that wait, on which env host), with all admissions, evictions, batches and versions
that follow. Nothing is sent: scheduler, ledger, journal and dispatcher are the run's own, the hosts are this loop.

Invariant: the ledger's sum holds at the end, and there are as many live trajectories throughout as the figure says.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

import msgspec

from actors.core import Ref
from actors.env.messages import Outcome
from bus.message import NodeAddress
from coordinator.dispatch import Dispatcher, Terms
from coordinator.scheduling.journal import FileJournal
from coordinator.scheduling.ledger import Ledger
from coordinator.scheduling.mix import Mix, TaskStream
from coordinator.scheduling.rolling import RollingScheduler, Rules

GROUP_SIZE = 8
ALPHA = 1
HOSTS = 50
LOST = 0.02


class Decisions(msgspec.Struct, frozen=True):
    """What was measured."""

    live: int  # trajectories, on average
    decisions: int
    seconds: float  # by the wall clock
    cpu_seconds: float  # of this process
    versions: int  # steps of training meanwhile
    evicted: int

    @property
    def per_s(self) -> float:
        return self.decisions / self.seconds

    @property
    def per_cpu_s(self) -> float:
        """What a core that nobody else uses would do."""
        return self.decisions / self.cpu_seconds


def measure(live: int = 100_000, decisions: int = 200_000, seed: int = 0) -> Decisions:
    """Half of what is live has a place, the other half waits for one or is buffered."""
    with tempfile.TemporaryDirectory(prefix="rollart-decisions-") as directory:
        journal = FileJournal(Path(directory) / "ledger.jsonl")
        try:
            return _Bench(journal, live, seed).run(decisions)
        finally:
            journal.close()


class _Bench:
    def __init__(self, journal: FileJournal, live: int, seed: int) -> None:
        batch = live // GROUP_SIZE // (1 + ALPHA)
        rules = Rules(batch, GROUP_SIZE, ALPHA, redundant_groups=0, temperature=1.0, seed=seed)
        mix = Mix({"easy": TaskStream(weight=2.0), "hard": TaskStream(weight=1.0, first=500_000_000)})
        self._scheduler = RollingScheduler(rules, Ledger(journal), mix)
        self._dispatcher = Dispatcher(self._scheduler, Terms(), time.monotonic)
        places = live // 2 // HOSTS
        for index in range(HOSTS):
            address = NodeAddress(f"env-{index}", f"tcp://10.0.0.{index}:7000", "", 1)
            self._dispatcher.hosts.join(Ref(address, "env"), places)
        self._dispatcher.hosts_changed()
        self._chance = random.Random(seed)
        self._running: list[str] = []
        self._starts = self._outcomes = self._versions = 0

    def run(self, decisions: int) -> Decisions:
        self._scheduler.open()
        self._follow()
        before, lives, samples = self._starts, 0, 0
        start, cpu = time.perf_counter(), time.process_time()
        while self._starts - before + self._outcomes < decisions:
            self._end_one()
            self._follow()
            if self._scheduler.ready():
                self._step()
            if self._outcomes % 1000 == 0:
                lives, samples = lives + sum(self._scheduler.counts()), samples + 1
        seconds, used = time.perf_counter() - start, time.process_time() - cpu
        balance = self._scheduler.ledger.balance()
        if not balance.holds:
            raise RuntimeError(f"the ledger does not add up: {balance}")
        taken = self._starts - before + self._outcomes
        return Decisions(lives // max(1, samples), taken, seconds, used, self._versions, sum(balance.evicted.values()))

    def _end_one(self) -> None:
        """Any of those that run."""
        index = self._chance.randrange(len(self._running))
        self._running[index], self._running[-1] = self._running[-1], self._running[index]
        id_ = self._running.pop()
        self._outcomes += 1
        if self._chance.random() < LOST:
            outcome = Outcome(id_, "lost", "env_failed")
        else:
            outcome = Outcome(id_, "stored", initiating_version=self._scheduler.version, reward=1.0, turns=8)
        self._dispatcher.ended(outcome)
        if outcome.state == "stored":
            self._scheduler.stored(outcome)
        else:
            self._scheduler.lost(outcome)

    def _follow(self) -> None:
        """What the coordinator does after everything."""
        scheduler, dispatcher = self._scheduler, self._dispatcher
        stops, scheduler.to_stop = scheduler.to_stop, []
        for id_, _ in stops:
            dispatcher.stop(id_)
        scheduler.to_discard.clear()
        for batch in dispatcher.batches():
            self._starts += len(batch.tickets)
            self._running += [ticket.id for ticket in batch.tickets]

    def _step(self) -> None:
        """Train on a batch, and serve what comes of it."""
        version = self._scheduler.version + 1
        self._scheduler.take()
        self._scheduler.trained(version)
        self._versions += 1
        self._follow()


def main() -> None:
    measured = measure()
    print(
        f"{measured.per_s:,.0f} decisions/s ({measured.per_cpu_s:,.0f} per second of CPU) with {measured.live:,} live "
        f"trajectories: {measured.decisions:,} in {measured.seconds:.1f} s, {measured.versions} versions, "
        f"{measured.evicted:,} evicted"
    )


if __name__ == "__main__":
    main()
