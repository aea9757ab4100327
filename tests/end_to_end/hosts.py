"""A run over hosts that can be lost: network namespaces, one spare, a ZooKeeper server that stands outside."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bus.security import make_key
from tests.end_to_end.runs import FROZENLAKE, TINY, Run, balance
from tests.support import machines
from tests.support.running import Command
from tests.support.zookeeper import running_servers

SPARE = 3
STARTED_S = 300.0
RECOVERED_S = 420.0
"""Until the test gives up; how long it may take is for the tests to say."""

JOB = (
    *TINY,
    "train.steps=100000",
    "checkpoint.every=2",
    "environment.workers=1",
    "environment.max_turns=8",
    "coordinator.takeover_s=20",
)


class Cluster:
    """The run, seen from outside."""

    def __init__(self, directory: Path, hosts: Sequence[machines.Machine], commands: Sequence[Command]) -> None:
        self.directory = directory
        self.hosts = hosts
        self.commands = commands
        self.began = time.monotonic()
        self.started_s = 0.0

    @property
    def run(self) -> Run:
        return Run.latest(self.directory)

    def said(self) -> str:
        standby = self.run.path / "logs" / "standby.out"
        text = standby.read_text(errors="replace")[-4000:] if standby.exists() else "none"
        return "\n".join([*(command.said() for command in self.commands), f"standby: {text}"])

    def stdout(self) -> str:
        """Of the coordinators, the last one last."""
        standby = self.run.path / "logs" / "standby.out"
        return self.commands[0].stdout + (standby.read_text(errors="replace") if standby.exists() else "")

    def events(self) -> list[dict[str, Any]]:
        path = self.run.path / "hosts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def version(self) -> int:
        return max((int(step["version"]) for step in self.run.steps()), default=0)

    def until(self, condition: Any, what: str, timeout_s: float = RECOVERED_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s\n{self.said()}"
            time.sleep(0.05)

    def until_ready(self) -> None:
        """Steps are made, every spare has joined, and one has a standby."""
        self.commands[0].wait_for(r"step 3/", timeout_s=STARTED_S)
        self.started_s = time.monotonic() - self.began
        standby = self.run.path / "logs" / "standby.out"
        self.until(lambda: standby.exists() and "standing by" in standby.read_text(), "a standby", STARTED_S)

    def lose(self, number: int, how: str) -> dict[str, float]:
        """Lose a host for good, ``kill`` or ``cut``; returns how long it took until each of its roles was up again, and
        until a step was made."""
        host, before, began = self.hosts[number], len(self.events()), time.time()
        ups = [event for event in self.events() if event["event"] == "up"]
        elsewhere = {event["roles"][0] for event in ups if not _at(event, host)}
        roles = {event["roles"][0] for event in ups if _at(event, host)} - elsewhere
        host.kill() if how == "kill" else host.cut()

        def up() -> dict[str, float]:
            events = [event for event in self.events()[before:] if event["event"] == "up" and not _at(event, host)]
            return {event["roles"][0]: event["time"] - began for event in events if event["roles"][0] in roles}

        self.until(lambda: set(up()) == roles, f"{', '.join(roles)} up again")
        steps = len(self.run.steps())
        self.until(lambda: len(self.run.steps()) > steps, "a step")
        return {**up(), "a step": time.time() - began}

    def end(self, *, lost: int) -> dict[str, int]:
        """SIGTERM to whoever leads, or to the spare beside it, as a person would; returns the run's last sum."""
        (spare,) = [pid for pid in self.hosts[SPARE].pids() if b"\0spare\0" in _command_line(pid)]
        if lost == 0:
            os.kill(spare, signal.SIGTERM)
        else:
            self.commands[0].send(signal.SIGTERM)
        for number, command in enumerate(self.commands):
            if number != lost:
                assert command.wait(timeout_s=STARTED_S) == (130 if number == 0 else 0), self.said()
        return balance(self.stdout())


def _command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _at(event: dict[str, Any], host: machines.Machine) -> bool:
    return bool(event["host"] == host.address)


@contextmanager
def cluster(directory: Path, roles: str, *overrides: str) -> Iterator[Cluster]:
    """``roles``: the map for three hosts; the fourth one is the spare."""
    key = directory / "cluster.key"
    make_key(key)
    with ExitStack() as stack:
        bridge, hosts = stack.enter_context(machines.hosts(4))
        (server,) = stack.enter_context(running_servers(1, host=bridge))
        job = [str(FROZENLAKE), *JOB, f"coordinator.store=zk://{server.address}", *overrides]
        common = ["--coordinator", hosts[0].address, "--key-file", str(key), "--runs", str(directory / "runs")]
        commands = []
        for number, host in enumerate(hosts):
            own = ["--spare"] if number == SPARE else ["--hosts", "3", "--roles", roles]
            words = [sys.executable, "-m", "coordinator.commands.start_node", *job, *common, "--address", host.address]
            command = Command(f"host-{number}", host.words([*words, "--index", str(number), *own]), directory, {})
            stack.callback(command.kill)
            commands.append(command)
            if number == 0:
                command.wait_for(r"waiting at", timeout_s=STARTED_S)
        yield Cluster(directory, hosts, commands)
