"""Whether a leader that is alive keeps leading on a machine that has no time for it, and one that dies is succeeded.

    python -m benchmarks.coordinator.failover                 an hour, twice as many hogs as cores
    python -m benchmarks.coordinator.failover --minutes 3     a look
    python -m benchmarks.coordinator.failover --json          one JSON object instead of the table

A leader, a standby and every role as a process of its own play the quick start's job on a real ZooKeeper server, while
``overcommit`` times as many processes as there are cores do nothing but compute, all at this program's priority. In
that time nobody may take over (a *false fail-over*: its reason is told, and the standby's place is filled again), and
it is counted how often the leader was *uncertain* (no confirmation in time; it takes no decision then, and goes on) and
how often a role thought that its leader was lost. At the end, still under that load, the leader is killed: the next one
leads, books what has ended meanwhile, admits a trajectory (as soon as there is a place: with all taken, that waits for
a step) and does a step. Exit status 1: a false fail-over, or none at the end within 5 s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from benchmarks.coordinator.crowd import hogs, runnable
from coordinator.launching.exits import DEPOSED
from tests.support.running import ROOT, Command, started
from tests.support.zookeeper import zookeeper_servers

JOB = ROOT / "examples" / "frozenlake.yaml"
COMMAND = "coordinator.commands.start"
ROLES = ("proxy", "env", "reward", "trainer", "weightsync")
STEP = b'"record":"step"'  # in a line of metrics.jsonl; of ledger.jsonl:
EVENT, ADMITTED = b'"event":', b'"event":"admitted"'
START_S = 900.0
TAKEOVER_S = 300.0
WITHIN_S = 5.0
LOOK_S = 0.5
TOLD = 20
"""How often progress is told."""


class FailoverFailed(RuntimeError):
    """There is nothing to judge: the run did not last; the message has its last words."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen."""

    minutes: float
    overcommit: float  # asked for
    runnable_per_core: float  # mean of what was there
    steps: int  # that the job did meanwhile
    false_failovers: list[str]  # why, each
    uncertain: int
    longest_uncertain_s: float
    alarms: int  # of roles that thought their leader lost
    led_after_s: float  # the leader was killed
    booked_after_s: float
    admitted_after_s: float
    step_after_s: float

    @property
    def holds(self) -> bool:
        return not self.false_failovers and self.led_after_s < WITHIN_S


class Cast:
    """The processes of one run, the leader first among its coordinators."""

    def __init__(self, directory: Path, store: str, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._names = 0
        overrides = [f"coordinator.store={store}", "train.steps=10000000", "evaluation.target=null"]
        words = [str(JOB), *overrides, "--runs", str(directory / "runs")]
        self.epoch = 1
        self.leader = self._start("leader", "coordinator", *words)
        address = self.leader.wait_for(r"--join (tcp://\S+)", timeout_s=START_S)[1]
        self.run = (directory / "runs" / "latest").resolve()
        self.standby = self._stand_by()
        self.roles = [self._start(role, role, "--join", address, "--name", f"{role}-node") for role in ROLES[::-1]]
        self.until(lambda: self.steps() > 0, START_S, "done a step")

    def _start(self, name: str, *words: str) -> Command:
        return self._stack.enter_context(started(COMMAND, *words, directory=self._directory, name=name))

    def _stand_by(self) -> Command:
        self._names += 1
        standby = self._start(f"standby-{self._names}", "coordinator", "--standby-of", str(self.run))
        standby.wait_for("standing by", timeout_s=START_S)
        return standby

    def steps(self) -> int:
        """Done by now."""
        path = self.run / "metrics.jsonl"
        return path.read_bytes().count(STEP) if path.exists() else 0

    def since_now(self, name: str, what: bytes) -> Callable[[], bool]:
        """Whether a file of the run has got such a line."""
        path = self.run / name
        size = path.stat().st_size

        def there() -> bool:
            with path.open("rb") as file:
                file.seek(size)
                return what in file.read()

        return there

    def logged(self, pattern: str) -> list[str]:
        """What the pattern's group found in all logs of the run."""
        logs = sorted((self.run / "logs").glob("*.log*"))
        return [found for path in logs for found in re.findall(pattern, path.read_text(errors="replace"))]

    def succeeded(self) -> bool:
        """Whether the standby leads."""
        return f"under epoch {self.epoch + 1}" in self.standby.stdout

    def look(self) -> str | None:
        """Why another one leads since the last look, if one does. Raises ``FailoverFailed``."""
        for command in (self.standby, *self.roles):
            if command.ended:
                raise FailoverFailed(command.said())
        if not self.leader.ended and not self.succeeded():
            return None
        self.until(self.succeeded, TAKEOVER_S, "taken over")
        if self.leader.wait(timeout_s=TAKEOVER_S) != DEPOSED:
            raise FailoverFailed(self.leader.said())
        why = self.leader.stderr.strip().splitlines()[-1]
        self.epoch += 1
        self.leader, self.standby = self.standby, self._stand_by()
        return why

    def until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Raises ``FailoverFailed``."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                said = "\n".join(one.said() for one in (self.leader, self.standby, *self.roles))
                raise FailoverFailed(f"not {what} within {timeout_s:g} s\n{said}")
            time.sleep(0.01)


def watch(cast: Cast, minutes: float, cores: int) -> tuple[list[str], list[int]]:
    """Why others took over, and how many threads wanted to run, look by look."""
    began = time.monotonic()
    whys: list[str] = []
    wanting: list[int] = []
    told = 0
    while (now := time.monotonic() - began) < minutes * 60:
        wanting.append(runnable())
        why = cast.look()
        whys += [] if why is None else [why]
        if why is not None:
            _say(f"after {now:.0f} s another one leads: {why}")
        if now * TOLD >= told * minutes * 60:
            told += 1
            load = statistics.fmean(wanting) / cores
            seen = f"{load:.1f} runnable a core, {cast.steps()} steps, {len(whys)} false fail-overs"
            _say(f"{now / 60:.1f} of {minutes:g} min: {seen}")
        time.sleep(LOOK_S)
    return whys, wanting


def kill(cast: Cast) -> list[float]:
    """Seconds from the leader's death until the next one leads, has booked something, has admitted a trajectory, has
    done a step."""
    cast.leader.send(signal.SIGKILL)
    began = time.monotonic()
    waits = [
        (cast.succeeded, "taken over"),
        (cast.since_now("ledger.jsonl", EVENT), "booked anything"),
        (cast.since_now("ledger.jsonl", ADMITTED), "admitted a trajectory"),
        (cast.since_now("metrics.jsonl", STEP), "done a step"),
    ]
    took = []
    for condition, what in waits:
        cast.until(condition, TAKEOVER_S, what)
        took.append(time.monotonic() - began)
    return took


def judge(minutes: float, overcommit: float) -> Verdict:
    """Raises ``FailoverFailed``, ``ServerFailed``."""
    cores = len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="rollart-failover-"))
        (address,) = stack.enter_context(zookeeper_servers(1))
        cast = Cast(Path(directory), f"zk://{address}", stack)
        _say(f"a leader, a standby and {len(cast.roles)} roles: the first step is done")
        stack.enter_context(hogs(round(overcommit * cores)))
        before = cast.steps()
        whys, wanting = watch(cast, minutes, cores)
        steps = cast.steps() - before
        lapses = [float(found) for found in cast.logged(r"was uncertain for (\d+\.\d+) s")]
        alarms = len(cast.logged(r"(lost the coordinator \()"))
        led, booked, admitted, step = kill(cast)
    return Verdict(
        minutes=minutes,
        overcommit=overcommit,
        runnable_per_core=statistics.fmean(wanting) / cores,
        steps=steps,
        false_failovers=whys,
        uncertain=len(lapses),
        longest_uncertain_s=max(lapses, default=0.0),
        alarms=alarms,
        led_after_s=led,
        booked_after_s=booked,
        admitted_after_s=admitted,
        step_after_s=step,
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def table(verdict: Verdict) -> str:
    """For people."""
    return "\n".join(
        [
            f"watched             {verdict.minutes:g} min, {verdict.runnable_per_core:.1f} runnable threads a core "
            f"(hogs alone: {verdict.overcommit:g}), {verdict.steps} steps done",
            f"false fail-overs    {len(verdict.false_failovers)}",
            *(f"                    {why}" for why in verdict.false_failovers),
            f"uncertain           {verdict.uncertain} times, {verdict.longest_uncertain_s:.2f} s at most",
            f"roles' alarms       {verdict.alarms}",
            f"the leader killed   the next one led after {verdict.led_after_s:.2f} s, booked something after "
            f"{verdict.booked_after_s:.2f} s, admitted a trajectory after {verdict.admitted_after_s:.2f} s, had done a "
            f"step after {verdict.step_after_s:.2f} s",
            f"verdict: {'holds' if verdict.holds else 'does NOT hold'}",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.coordinator.failover", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--overcommit", type=float, default=2.0, metavar="TIMES", help="hogs a core (default: 2)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args(argv)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, nice {os.nice(0)}"
    try:
        verdict = judge(arguments.minutes, arguments.overcommit)
    except FailoverFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps({**msgspec.to_builtins(verdict), "holds": verdict.holds, "machine": machine}))
    else:
        print(table(verdict))
        print(machine)
    return 0 if verdict.holds else 1


if __name__ == "__main__":
    sys.exit(main())
