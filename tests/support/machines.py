"""Hosts that can be lost: network namespaces on one bridge of this machine, with one file system.

    with hosts(4) as (bridge, machines):          # 10.x.y.254 and 10.x.y.1 to 10.x.y.4
        machines[0].words(["python", "-m", ...])  # runs there
        machines[0].kill()                        # kill -9 of everything that runs there: the kernel closes its sockets
        machines[1].cut()                         # its link is down: nobody hears of it, and it goes on

Needs root and ``ip`` (iproute2); ``why_not`` says what is missing.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

MOST_MADE = 8
_made = itertools.count()


def why_not() -> str:
    """Why there can be none here; "" where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need ip: apt-get install iproute2"
    name = f"rl-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces cannot be made here: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


class Machine:
    """One namespace."""

    def __init__(self, name: str, address: str, link: str) -> None:
        self.name = name
        self.address = address
        self._link = link

    def words(self, words: Sequence[str]) -> list[str]:
        """The command line that runs ``words`` there."""
        return ["ip", "netns", "exec", self.name, *words]

    def pids(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """Everything, until nothing is left."""
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def cut(self) -> None:
        _ip("link", "set", self._link, "down")

    def mend(self) -> None:
        _ip("link", "set", self._link, "up")


@contextmanager
def hosts(count: int) -> Iterator[tuple[str, list[Machine]]]:
    """The bridge's own address, under which this machine can be reached from all, and the hosts."""
    mark = os.getpid() * MOST_MADE + next(_made) % MOST_MADE  # a link outlives its namespace for a moment
    bridge, net = f"rlb{mark}", f"10.{64 + mark // 256 % 128}.{mark % 256}"
    machines = [Machine(f"rl{mark}-{n}", f"{net}.{n}", f"rlv{mark}-{n}") for n in range(1, count + 1)]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("address", "add", f"{net}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for machine in machines:
            _ip("netns", "add", machine.name)
            _ip("link", "add", machine._link, "type", "veth", "peer", "name", "eth0", "netns", machine.name)
            _ip("link", "set", machine._link, "master", bridge, "up")
            _ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", machine.name, "link", "set", device, "up")
        yield f"{net}.254", machines
    finally:
        for machine in machines:
            with suppress(subprocess.CalledProcessError):  # it was not made
                machine.kill()
            for what in (("link", "del", machine._link), ("netns", "del", machine.name)):  # a link goes late by itself
                with suppress(subprocess.CalledProcessError):
                    _ip(*what)
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", bridge)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout
