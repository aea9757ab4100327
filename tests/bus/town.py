"""Processes that call each other over ZeroMQ while they are killed, started again and made to stand still.

A town lives in a directory of its own for the length of one history. Its people are processes of ``tests.bus.life``;
guests are processes that somebody else has started and that live longer than the town.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from bus.message import NodeAddress
from tests.bus.history import AnyEvent, Down, History, Life
from tests.bus.life import Settings, read_address

ROOT = Path(__file__).parents[2]
START_S = 60.0
END_S = 60.0
GREET_S = 0.5
"""In which a newcomer makes itself known to all, so that they hear that its predecessor was killed."""

SLACK_S = 2.0
"""By which a busy machine may be late."""

Process = subprocess.Popen[bytes]


def start_process(module: str, settings: Settings, output: Path) -> Process:
    """``python -m module '<settings>'``, which dies with this process."""
    with output.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", module, msgspec.json.encode(settings).decode()],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "ROLLART_PARENT": str(os.getpid())},
            stdout=file,
            stderr=file,
        )


class Town:
    """The processes of one history. ``plain``: what its settings have in common."""

    def __init__(
        self,
        directory: Path,
        names: Sequence[str],
        seed: int,
        *,
        guests: Mapping[str, Process] | None = None,
        slack_s: float = SLACK_S,
        plain: Settings | None = None,
    ) -> None:
        self._directory = directory
        self._names = names
        self._guests = guests or {}
        self._slack_s = slack_s
        self._plain = plain or Settings()
        self._chance = random.Random(seed)
        self._running: dict[str, Process] = {}
        self.events: list[AnyEvent] = []
        self.stops = 0

    # ---- its people ----------------------------------------------------------------------------------------------

    def start(self, name: str, *, port: int = 0) -> None:
        everyone = [*self._names, *self._guests]
        settings = msgspec.structs.replace(
            self._plain,
            directory=str(self._directory),
            name=name,
            peers=[other for other in everyone if other != name],
            seed=self._chance.getrandbits(32),
            port=port,
        )
        self._running[name] = start_process("tests.bus.life", settings, self._directory / f"{name}.out")

    def address(self, name: str) -> NodeAddress:
        """Once its process has one."""
        path = self._directory / f"{name}.address"
        self._until(lambda: read_address(path) is not None, f"{name} never came up", START_S)
        address = read_address(path)
        if address is None:
            raise AssertionError(f"the address of {name} was taken away: see {self._directory}")
        return address

    def begin(self) -> None:
        """All of them, and the guests, are there."""
        for name in self._names:
            self.start(name)
        for name in [*self._names, *self._guests]:
            self.address(name)

    # ---- what happens to them ------------------------------------------------------------------------------------

    def kill(self, name: str, *, same_place: bool) -> None:
        """And start it again."""
        address = self.address(name)
        process = self._running[name]
        process.kill()
        process.wait()
        self.events.append(Down(at=time.monotonic(), life=Life(name, address.epoch), killed=True))
        (self._directory / f"{name}.address").unlink()
        self.start(name, port=int(address.control.rsplit(":", 1)[1]) if same_place else 0)

    def pause(self, name: str, seconds: float) -> None:
        """Let it stand still, and go on."""
        process = self._running[name] if name in self._running else self._guests[name]
        process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            process.send_signal(signal.SIGCONT)
        self.stops += 1

    def kill_now_and_then(self, seconds: float, every_s: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(self._chance.uniform(0.5, 1.5) * every_s)
            self.kill(self._chance.choice(self._names), same_place=self._chance.random() < 0.5)

    # ---- the end -------------------------------------------------------------------------------------------------

    def finish(self) -> History:
        """All calls end, then all processes but the guests; what they wrote."""
        everyone = [*self._names, *self._guests]
        for name in everyone:
            self.address(name)
        time.sleep(GREET_S)
        (self._directory / "stop").touch()
        self._until(self._there(everyone, "idle"), "calls did not end")
        time.sleep(self._slack_s)  # what was sent arrives, and what was watched is missed
        over_at = time.monotonic()
        (self._directory / "close").touch()
        statuses = {name: process.wait(timeout=END_S) for name, process in self._running.items()}
        self._running.clear()
        left = [f"{name} ended with status {status}" for name, status in statuses.items() if status != 0]
        (self._directory / "over").touch()
        self._until(self._there(list(self._guests), "left"), "guests did not come to rest")
        for name in everyone:
            path = self._directory / f"{name}.left"
            left += msgspec.json.decode(path.read_bytes(), type=list[str]) if path.exists() else []
            output = self._directory / f"{name}.out"
            left += output.read_text().splitlines() if output.exists() else []
        for path in sorted(self._directory.glob("*.events")):
            self.events += [msgspec.json.decode(line, type=AnyEvent) for line in path.read_bytes().splitlines()]
        self.events.sort(key=lambda event: event.at)
        return History(self.events, left_over=left, slack_s=self._slack_s, over_at=over_at)

    def end(self) -> None:
        """Whatever has become of them."""
        for process in self._running.values():
            process.kill()
            process.wait()

    def _there(self, names: Sequence[str], ending: str) -> Callable[[], bool]:
        return lambda: all((self._directory / f"{name}.{ending}").exists() for name in names)

    def _until(self, condition: Callable[[], bool], why: str, within_s: float = 60.0) -> None:
        end = time.monotonic() + within_s
        while not condition():
            everyone = {**self._running, **self._guests}
            ended = {name: process.returncode for name, process in everyone.items() if process.poll() is not None}
            if ended:
                raise AssertionError(f"{why}: {ended} ended, see {self._directory}")
            if time.monotonic() > end:
                raise AssertionError(f"{why} within {within_s:g} s: see {self._directory}")
            time.sleep(0.01)
