"""A run on which everything is killed that can be, at random moments, until it has reached its target.

A blow names a process and a moment: any, at once after the blow before (while that is being recovered from), in the
middle of a checkpoint (its directory is being written) or of a swap (a step is on record a moment ago). Whoever is hit,
the run recovers or ends; where it ends it is resumed. What must hold afterwards is asserted in ``test_storm``.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from actors.trainer.store import read_records
from tests.end_to_end.runs import TRAIN, Run
from tests.support.running import Command, TookTooLong, started

VICTIMS = ("engine-0", "env-worker-0", "reward-worker-0", "trainer-0", "control")
MOMENTS = ("any", "at once", "checkpoint", "swap")
START_S = 180.0
SITTING_S = 300.0
MOMENT_S = 20.0
LAST_STEPS = 10


class Storm:
    """The run directory, and what was seen of the run from outside."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.random = random.Random(seed)
        self.hits: Counter[str] = Counter()
        self.acknowledged: set[str] = set()  # tickets that the trainer's store had on disk when something was killed
        self.leftovers: list[str] = []
        self.sittings = 0
        self.unexpected: list[str] = []
        self.missed = 0  # moments that did not come
        self.last_version = 0
        self.stdout = ""  # of the last sitting

    @property
    def run(self) -> Run:
        return Run.latest(self.directory)

    def rage(self, job: str, overrides: tuple[str, ...], blows: int) -> int:
        """Run and resume under ``blows`` kills, then let it make ``LAST_STEPS`` more; returns the last exit status."""
        left = [(VICTIMS[number % len(VICTIMS)], self.random.choice(MOMENTS)) for number in range(blows)]
        self.random.shuffle(left)
        while left:
            with self._sitting(job, overrides) as command:
                self._strike_until_it_ends(command, left)
                if not left and not command.ended:
                    command.send(signal.SIGINT)
                self._end(command, {1, 130, -signal.SIGKILL})
            if self.sittings > 3 * blows:
                raise TookTooLong(f"{self.sittings} sittings, and {len(left)} blows are left")
        self.last_version = self.run.checkpoints()[-1] + LAST_STEPS
        with self._sitting(job, (f"train.steps={self.last_version}",)) as command:
            return self._end(command, {0})

    def _end(self, command: Command, expected: set[int]) -> int:
        status = command.wait(timeout_s=SITTING_S)
        self.leftovers += command.leftovers(grace_s=10.0)
        # torch makes itself an empty cache directory of this name, the same for all processes of a user.
        temporary = [path for path in command.temporary.iterdir() if not path.name.startswith("torchinductor_")]
        self.leftovers += [f"temporary file {path}" for path in temporary]
        self.stdout = command.stdout
        if status not in expected or "Traceback" in command.stdout + command.stderr:
            self.unexpected.append(command.said())
        return status

    def _sitting(self, job: str, overrides: tuple[str, ...]) -> AbstractContextManager[Command]:
        self.sittings += 1
        where = ["--runs", str(self.directory / "runs")]
        begun = (self.directory / "runs" / "latest").exists() and self.run.checkpoints()
        words = ["--resume", "runs/latest", *overrides] if begun else [job, *overrides, *where]
        return started(TRAIN, *words, directory=self.directory, name=str(self.sittings))

    def _strike_until_it_ends(self, command: Command, left: list[tuple[str, str]]) -> None:
        """One blow after the other, as long as there are any and it stands; then one more step shows that it does."""
        steps = 0
        try:
            steps = self._wait_for_a_step(command, steps)
            while left:
                victim, moment = left[-1]
                if moment != "at once":
                    steps = self._wait_for_a_step(command, steps)
                pid = command.pid if victim == "control" else command.children().get(victim)
                if pid is None:  # it is being started again
                    self._wait_for(command, victim)
                    continue
                self.acknowledged |= self._stored()
                self._wait_for_moment(moment)
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:  # it has just ended, as when a recovery starts everything again
                    if victim == "control":
                        raise
                    continue
                left.pop()
                self.hits[f"{victim}, {moment}"] += 1
            self._wait_for_a_step(command, steps)
        except (TookTooLong, ProcessLookupError):
            if not command.ended:
                raise

    def _wait_for(self, command: Command, child: str) -> None:
        command.until(lambda: child in command.children(), timeout_s=START_S, what=f"started {child} again")

    def _wait_for_a_step(self, command: Command, seen: int) -> int:
        """Wait until it has said more steps than before; returns how many it has said by then."""
        said: list[int] = []

        def look() -> bool:
            said.append(len(re.findall(r"^step ", command.stdout, re.MULTILINE)))
            return said[-1] > seen

        command.until(look, timeout_s=START_S, what="made a step")
        time.sleep(self.random.uniform(0.0, 1.0))
        return said[-1]

    def _wait_for_moment(self, moment: str) -> None:
        """The next time that it comes, if it comes soon."""
        if moment in ("any", "at once"):
            time.sleep(self.random.uniform(0.0, 0.3))
            return
        comes = self._checkpointing() if moment == "checkpoint" else self._swapping()
        deadline = time.monotonic() + MOMENT_S
        while time.monotonic() < deadline:
            if comes():
                return
            time.sleep(0.0005)
        self.missed += 1

    def _checkpointing(self) -> Callable[[], bool]:
        directory = self.run.path / "checkpoints"
        return lambda: any(name.startswith(".partial-") for name in os.listdir(directory))

    def _swapping(self) -> Callable[[], bool]:
        """A step is on record: its version is on its way to the engines for the next milliseconds."""
        metrics = self.run.path / "metrics.jsonl"
        size = metrics.stat().st_size
        return lambda: metrics.stat().st_size > size

    def _stored(self) -> set[str]:
        """What the trainer has acknowledged by now: a reader of its own, beside the running writer."""
        path = self.run.path / "store" / "trajectories.log"
        return {trajectory.ticket for trajectory, _ in read_records(path)} if path.exists() else set()
