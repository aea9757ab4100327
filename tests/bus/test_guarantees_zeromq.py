"""The guarantees of delivery over ZeroMQ, between processes that are killed and started again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from bus.message import NodeAddress
from tests.bus.history import AnyEvent, Down, Event, History, Life
from tests.bus.life import Settings, read_address
from tests.bus.semantics import violations

ROOT = Path(__file__).parents[2]
NAMES = ["a", "b", "c"]
SLACK_S = 2.0
"""By which a busy machine may be late."""


class Town:
    """The processes of one history."""

    def __init__(self, directory: Path, seed: int, *, forgetful: bool) -> None:
        self._directory = directory
        self._forgetful = forgetful
        self._chance = random.Random(seed)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.events: list[AnyEvent] = []

    def start(self, name: str, *, port: int = 0) -> None:
        peers = [other for other in NAMES if other != name]
        settings = Settings(str(self._directory), name, peers, self._chance.getrandbits(32), port, self._forgetful)
        with (self._directory / f"{name}.out").open("ab") as output:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-m", "tests.bus.life", msgspec.json.encode(settings).decode()],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "ROLLART_PARENT": str(os.getpid())},
                stdout=output,
                stderr=output,
            )

    def address(self, name: str) -> NodeAddress:
        """Once its process has one."""
        path = self._directory / f"{name}.address"
        self._until(lambda: read_address(path) is not None, f"{name} never came up")
        address = read_address(path)
        assert address is not None
        return address

    def kill(self, name: str, *, same_place: bool) -> None:
        """And start it again."""
        address = self.address(name)
        process = self._running[name]
        process.kill()
        process.wait()
        self.events.append(Down(at=time.monotonic(), life=Life(name, address.epoch), killed=True))
        (self._directory / f"{name}.address").unlink()
        self.start(name, port=int(address.control.rsplit(":", 1)[1]) if same_place else 0)

    def storm(self, seconds: float, every_s: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(self._chance.uniform(0.5, 1.5) * every_s)
            self.kill(self._chance.choice(NAMES), same_place=self._chance.random() < 0.5)

    def finish(self) -> History:
        for name in NAMES:
            self.address(name)
        (self._directory / "stop").touch()
        self._until(lambda: len(list(self._directory.glob("*.idle"))) == len(NAMES), "calls did not end")
        time.sleep(SLACK_S)  # what was sent arrives, and what was watched is missed
        over_at = time.monotonic()
        (self._directory / "close").touch()
        for process in self._running.values():
            assert process.wait(timeout=60) == 0
        left: list[str] = []
        for name in NAMES:
            left += msgspec.json.decode((self._directory / f"{name}.left").read_bytes(), type=list[str])
            left += (self._directory / f"{name}.out").read_text().splitlines()
        for path in sorted(self._directory.glob("*.events")):
            self.events += [msgspec.json.decode(line, type=AnyEvent) for line in path.read_bytes().splitlines()]
        self.events.sort(key=lambda event: event.at)
        return History(self.events, left_over=left, slack_s=SLACK_S, over_at=over_at)

    def end(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def _until(self, condition: Callable[[], bool], why: str) -> None:
        for _ in range(6_000):
            if condition():
                return
            ended = {name: process.returncode for name, process in self._running.items() if process.poll() is not None}
            if ended:
                raise AssertionError(f"{why}: {ended} ended, see {self._directory}")
            time.sleep(0.01)
        raise AssertionError(f"{why} within a minute: see {self._directory}")


def play(directory: Path, seed: int, *, seconds: float, every_s: float, forgetful: bool = False) -> History:
    town = Town(directory, seed, forgetful=forgetful)
    try:
        for name in NAMES:
            town.start(name)
        for name in NAMES:
            town.address(name)
        town.storm(seconds, every_s)
        return town.finish()
    finally:
        town.end()


def check(history: History) -> None:
    found = violations(history)
    kinds: Counter[type[Event]] = Counter(map(type, history.events))
    print({kind.__name__: count for kind, count in kinds.items()})
    if found:
        raise AssertionError("\n".join(found[:50]))


def test_processes_that_are_killed_and_started_again_keep_the_guarantees(tmp_path: Path) -> None:
    check(play(tmp_path, 1, seconds=3, every_s=0.7))


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(4))
def test_so_they_do_for_longer(tmp_path: Path, seed: int) -> None:
    check(play(tmp_path, seed, seconds=60, every_s=1.0))


@pytest.mark.deep
def test_a_fault_of_delivery_is_seen_here_too(tmp_path: Path) -> None:
    found = violations(play(tmp_path, 1, seconds=5, every_s=2.0, forgetful=True))
    assert any(text.startswith("once per incarnation") for text in found)
