"""Real ZooKeeper servers that are slow, stopped, dead or alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.doctor import store
from hwprobe.doctor import Unable, ensembles
from tests.doctor.preloads import preload
from tests.doctor.relay import far_away
from tests.support.ports import free_port
from tests.support.zookeeper import JARS, Server, running_servers


@pytest.fixture(scope="module")
def needs_server() -> None:
    if shutil.which("java") is None or not all(Path(jar).exists() for jar in JARS):
        pytest.skip("needs a ZooKeeper server: apt-get install --no-install-recommends zookeeper")


@pytest.fixture(scope="module")
def server(needs_server: None) -> Iterator[Server]:
    with running_servers(1) as (one,):
        yield one


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server on a busy machine is not one that hangs."""
    monkeypatch.setattr(ensembles, "ANSWER_S", 30.0)
    monkeypatch.setattr(store, "TIMEOUT_S", 30.0)


def test_a_server_that_answers_is_healthy(server: Server) -> None:
    examined = ensembles.look([server.address])
    assert examined.findings == []
    assert examined.notes[0].startswith(f"{server.address}: standalone, ")
    assert "min/avg/max" in examined.notes[0]
    examined = store.look(f"zk://{server.address}")
    assert examined.findings == []
    assert examined.notes[0].startswith("a change takes ")


def test_a_slow_server_is_found_by_its_answers_and_by_its_changes(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "ROUNDS", 3)
    with far_away(server.address, delay_s=0.06) as address:
        (finding,) = ensembles.look([address]).findings
        assert (finding.severity, finding.subject) == ("warning", address)
        assert float(finding.evidence.split("took ")[1].split()[0]) >= 120
        (finding,) = store.look(f"zk://{address}").findings
        assert finding.severity == "warning"
        assert float(finding.evidence.split("took ")[1].split()[0]) >= 120
        assert "far away or overloaded" in finding.cause
        assert "near the coordinators" in finding.remedy


def test_a_server_whose_disk_is_slow_is_told_from_one_that_is_far_away(
    tmp_path: Path, needs_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "ROUNDS", 3)
    slow = {**preload("slow_disk", tmp_path), "SLOW_DISK_MS": "300"}
    with running_servers(1, sync=True, environment=slow) as (server,):
        assert ensembles.look([server.address]).findings == []  # which needs no disk
        (finding,) = store.look(f"zk://{server.address}").findings
    assert finding.severity == "warning"
    assert float(finding.evidence.split("took ")[1].split()[0]) >= 300
    assert finding.cause.startswith("a server's disk is slow")
    assert finding.remedy.startswith("give every server a disk of its own for dataLogDir")
    assert "fsync-ing the write ahead log" in finding.remedy


def test_a_server_that_hangs_is_an_error_until_it_goes_on(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ensembles, "ANSWER_S", 0.5)
    server.pause()
    try:
        (finding,) = ensembles.look([server.address]).findings
    finally:
        server.resume()
    assert (finding.severity, finding.subject) == ("error", server.address)
    assert "no answer to srvr" in finding.evidence
    monkeypatch.setattr(ensembles, "ANSWER_S", 30.0)
    assert ensembles.look([server.address]).findings == []


def test_a_server_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "TIMEOUT_S", 1.0)
    address = f"127.0.0.1:{free_port()}"
    (finding,) = ensembles.look([address]).findings
    assert (finding.severity, finding.cause) == ("error", "no server runs there")
    (finding,) = store.look(f"zk://{address}").findings
    assert finding.severity == "error"
    assert "start the servers" in finding.remedy


def test_an_ensemble_without_a_majority_takes_no_changes(server: Server) -> None:
    dead = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    findings = ensembles.look([",".join([server.address, *dead])]).findings
    assert [finding.subject for finding in findings[:2]] == dead
    assert findings[2].evidence == "1 of 3 servers serve"


def test_without_servers_there_is_nothing_to_look_at() -> None:
    with pytest.raises(Unable, match="embedded"):
        ensembles.look([])
    with pytest.raises(Unable, match="embedded"):
        store.look("embedded")
    with pytest.raises(Unable, match="TLS"):
        ensembles.look(["127.0.0.1:2281"], tls=True)
