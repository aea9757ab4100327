"""Segments that are really sent again: a connection into an interface that throws away what it is given."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hwprobe.tracing.report import How
from tests.tracing.loads import traced

# In a network namespace of its own: 10.9.9.2 has an address on the wire that nobody there listens to. A segment of each
# connection is sent again a second after the first one, then two seconds later, and so on.
LOST = """
ip link set lo up && ip link add lost0 type veth peer name lost1 && ip addr add 10.9.9.1/24 dev lost0 &&
ip link set lost0 up && ip link set lost1 up && ip neigh add 10.9.9.2 lladdr 02:00:00:00:00:02 dev lost0 &&
exec "$0" -c '
import collections, signal, socket, time
signal.alarm(600)
print("ready", flush=True)
kept = collections.deque(maxlen=20)
while True:
    ours = socket.socket()
    ours.setblocking(False)
    ours.connect_ex(("10.9.9.2", 80))
    kept.append(ours)
    time.sleep(0.3)
'
"""


@pytest.fixture
def connecting() -> Iterator[int]:
    """A process whose connections are never answered."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("a network namespace takes root, unshare and ip")
    process = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", LOST, sys.executable],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            pytest.skip(f"no pair of interfaces: {process.communicate(timeout=30)[1].decode().strip()[-200:]}")
        yield process.pid
    finally:
        process.kill()
        process.communicate(timeout=30)


@pytest.mark.parametrize("how", ["sampling", "bpf"])
def test_a_segment_that_nobody_answers_is_counted_as_sent_again(how: How, connecting: int) -> None:
    report = traced("retransmits", how, connecting, seconds=2.0)
    ours = [entry for entry in report.entries if entry.name.endswith(" > 10.9.9.2:80")]
    assert sum(entry.figures["retransmits"] for entry in ours) >= 1
    assert {stack.partition(";")[2] for stack in report.folded} == {"10.9.9.2:80"}
    if how == "sampling":
        everything = report.entries[-1]
        assert everything.name == "all of the machine (or container)"
        assert everything.figures["retransmits"] >= ours[0].figures["retransmits"]
