from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import machines
from tests.support.machines import Machine
from tests.support.namespaces import TUN, End, Line, wire

Mount = Callable[[str], Path]


@pytest.fixture
def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")


@pytest.fixture(scope="module")
def machine_room() -> Iterator[tuple[Machine, Machine]]:
    if why := machines.why_not():
        pytest.skip(why)
    with machines.hosts(2) as (_, (one, other)):
        yield one, other


@pytest.fixture
def pair(machine_room: tuple[Machine, Machine]) -> tuple[Machine, Machine]:
    """Two hosts on one bridge, connected, with jumbo frames from end to end; settings are left as they were last."""
    for machine in machine_room:
        machine.mend()
        set_mtu(machine, 9000)
    return machine_room


def set_mtu(machine: Machine, mtu: int) -> None:
    """Of its interface; the link's other end, at the bridge, follows only upwards."""
    if mtu > 1500:
        subprocess.run(["ip", "link", "set", machine._link, "mtu", str(mtu)], check=True)
    subprocess.run(["ip", "-n", machine.name, "link", "set", "eth0", "mtu", str(mtu)], check=True)


@pytest.fixture
def damaged() -> Iterator[tuple[End, End, Line]]:
    """A wire that a test may damage."""
    if why := machines.why_not():
        pytest.skip(why)
    if not TUN.exists():
        pytest.skip(f"{TUN} is not there")
    with wire() as ends:
        yield ends


@pytest.fixture
def small_disk(tmp_path: Path, needs_root: None) -> Iterator[Mount]:
    """Mounts a tmpfs with these options; gone with the test."""
    made: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"disk{len(made)}"
        place.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
        made.append(place)
        return place

    yield mount
    for place in made:
        subprocess.run(["umount", str(place)], check=True)
