"""Between two hosts: one answers (``doctor --serve``), the other asks; one of them has a fault."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from bus.security import ClusterKey, make_key
from coordinator.doctor import between
from hwprobe.doctor import Examined, Unable
from hwprobe.doctor.peers import Peer, parse_peer
from tests.doctor.preloads import preload
from tests.doctor.relay import far_away
from tests.doctor.wheels import installed
from tests.support.machines import Machine
from tests.support.namespaces import within

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def serving(words: Sequence[str] = (), before: Sequence[str] = (), **environment: str) -> Iterator[Peer]:
    """``doctor --serve`` in a process of its own."""
    command = [*before, sys.executable, "-m", "coordinator.commands.doctor", "--serve", "--for", "300", *words]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("--peer tcp://"), line
        yield parse_peer(line.split()[1])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with serving() as found:
        yield found


def found_by(what: between.Look, peer: Peer, key: ClusterKey | None = None) -> Examined:
    return between.look([peer], key, what)


def test_two_healthy_hosts_give_no_finding(peer: Peer) -> None:
    for what in (between.latency, between.bandwidth, between.clock, between.software):
        examined = found_by(what, peer)
        assert examined.findings == []
        assert len(examined.notes) == 1


def test_a_clock_that_is_wrong_is_measured(tmp_path: Path) -> None:
    with serving(**preload("skewed_clock", tmp_path), SKEWED_CLOCK_S="-7") as peer:
        (finding,) = found_by(between.clock, peer).findings
    assert (finding.severity, finding.subject) == ("warning", peer.name)
    assert 6.5 <= float(finding.evidence.split("its clock is ")[1].split()[0]) <= 7.5
    assert "behind this host's" in finding.evidence
    assert "chronyc" in finding.remedy


def test_a_host_that_is_far_away_is_found(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(between, "LOOK_S", 0.5)
    with far_away(peer.name, delay_s=0.03) as address:
        (finding,) = found_by(between.latency, parse_peer(address)).findings
    assert finding.severity == "warning"
    assert float(finding.evidence.split("took ")[1].split()[0]) >= 30


def test_a_link_that_is_throttled_is_found(
    pair: tuple[Machine, Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    key = make_key(tmp_path / "cluster.key")
    words = ["--host", other.address, "--key-file", str(key.path)]
    shape = ["tc", "-n", one.name, "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "10mbit"]
    shape += ["burst", "64kb", "latency", "400ms"]
    with serving(words, other.words([])) as peer:
        assert within(one.name, lambda: found_by(between.bandwidth, peer, key)).findings == []
        done = subprocess.run(shape, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"traffic cannot be shaped here: {done.stderr.strip()}")
        monkeypatch.setattr(between, "LONGEST_S", 1.0)
        (finding,) = within(one.name, lambda: found_by(between.bandwidth, peer, key)).findings
    subprocess.run(["tc", "-n", one.name, "qdisc", "del", "dev", "eth0", "root"], check=True)
    assert finding.severity == "warning"
    assert float(finding.evidence.split()[0]) <= 2.5  # 10 Mbit/s, and what the queue takes at once
    assert "shaper" in finding.cause


def test_whoever_has_no_key_is_told_so(pair: tuple[Machine, Machine]) -> None:
    one, other = pair
    server = within(other.name, lambda: socket.create_server((other.address, 0)))
    with server, pytest.raises(Unable, match="--key-file"):
        within(one.name, lambda: found_by(between.latency, Peer(other.address, server.getsockname()[1])))


def test_what_listens_and_is_no_doctor_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(between, "ANSWER_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        (finding,) = found_by(between.latency, Peer("127.0.0.1", server.getsockname()[1])).findings
    assert finding.severity == "error"
    assert "--serve" in finding.remedy


def test_other_software_there_is_told(tmp_path: Path) -> None:
    older = installed(tmp_path / "older", "msgspec==0.19.0")
    with serving(PYTHONPATH=f"{older}:{ROOT}") as peer:
        (finding,) = found_by(between.software, peer).findings
    assert (finding.severity, finding.subject) == ("warning", peer.name)
    assert finding.evidence == f"it has msgspec 0.19.0 (here {msgspec.__version__})"
    assert "bin/setup" in finding.remedy


def test_peers_without_a_port_have_nobody_to_ask() -> None:
    with pytest.raises(Unable, match="--serve"):
        found_by(between.latency, Peer("10.0.0.2"))
