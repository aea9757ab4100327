"""One run that is interrupted and killed in every way that it must survive, as a chain of sittings.

    1  Ctrl-C
    2  the engine is killed and the environment worker is killed (it goes on), then SIGTERM
    3  the trainer's rank is killed (it goes back to the checkpoint and on), then the control process is killed
    4  the engine hangs (it goes on), then it runs to its end

What each must have led to is asserted in ``test_interruption`` and ``test_death``.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from tests.end_to_end.runs import FROZENLAKE, TINY, TRAIN, Run, training
from tests.support.running import Command, started

START_S = 90.0
ACKNOWLEDGED_S = 3.0  # asked for: 1 s; the rest is for a machine that is busy with other tests
ENDED_S = 10.0  # asked for: 5 s
BATCH, SIZE = 2, 4  # of TINY
BEYOND_THE_BUFFER = 4
"""Steps that cannot all have been made from what was buffered or in flight: alpha = 1 allows for two."""


class Sitting(NamedTuple):
    """One process that worked on the run."""

    status: int
    stdout: str
    stderr: str
    leftovers: list[str]
    checkpoint: dict[str, Any]
    """The newest one when it ended."""


class Story(NamedTuple):
    """See the module docstring."""

    run: Run
    ctrl_c: Sitting
    sigterm: Sitting
    control_killed: Sitting
    last: Sitting
    end: int  # the last version

    @property
    def saved(self) -> list[Sitting]:
        """The sittings that ended with a checkpoint of their own."""
        return [self.ctrl_c, self.sigterm, self.last]


def tell(directory: Path) -> Story:
    """Run it all; takes about a minute."""
    endless = ["train.steps=100000", "checkpoint.every=0"]
    with training(directory, str(FROZENLAKE), *TINY, *endless, name="1") as command:
        command.wait_for(r"step 5/", timeout_s=START_S)
        ctrl_c = interrupted(command, signal.SIGINT, r"Ctrl-C: stopping; a checkpoint is written first")
    with resumed(directory, "2") as command:
        command.wait_for("step ", timeout_s=START_S)
        os.kill(command.children()["engine-0"], signal.SIGKILL)
        goes_on(command)
        os.kill(command.children()["env-worker-0"], signal.SIGKILL)
        goes_on(command)
        sigterm = interrupted(command, signal.SIGTERM, r"SIGTERM: stopping; a checkpoint is written first")
    with resumed(directory, "3") as command:
        command.wait_for("step ", timeout_s=START_S)
        os.kill(command.children()["trainer-0"], signal.SIGKILL)
        back = command.wait_for(r"the trainer is started again from version (\d+)", timeout_s=START_S)
        command.wait_for(rf"step {int(back[1]) + BEYOND_THE_BUFFER}/", timeout_s=START_S)
        command.send(signal.SIGKILL)
        control_killed = ended(command, ENDED_S)
    end = control_killed.checkpoint["version"] + 12
    with resumed(directory, "4", f"train.steps={end}", "coordinator.silence_s=4") as command:
        command.wait_for("step ", timeout_s=START_S)
        os.kill(command.children()["engine-0"], signal.SIGSTOP)
        last = ended(command, START_S)
    return Story(Run.latest(directory), ctrl_c, sigterm, control_killed, last, end)


def resumed(directory: Path, name: str, *overrides: str) -> AbstractContextManager[Command]:
    return started(TRAIN, "--resume", "runs/latest", *overrides, directory=directory, name=name)


def goes_on(command: Command) -> None:
    """Wait until it has made more steps than it could have made without the part that is missing."""
    last = int(re.findall(r"^step (\d+)/", command.stdout, re.MULTILINE)[-1])
    command.wait_for(rf"step {last + BEYOND_THE_BUFFER}/", timeout_s=START_S)


def interrupted(command: Command, number: signal.Signals, acknowledgement: str) -> Sitting:
    command.send(number)
    command.wait_for(acknowledgement, timeout_s=ACKNOWLEDGED_S)
    return ended(command, ENDED_S)


def ended(command: Command, timeout_s: float) -> Sitting:
    status = command.wait(timeout_s=timeout_s)
    leftovers = command.leftovers(grace_s=1.0)
    checkpoint = Run.latest(command.directory).checkpoint()
    return Sitting(status, command.stdout, command.stderr, leftovers, checkpoint)
