"""Mooncake's own transfer engine over a wire that loses packets: what it logs, and what the doctor makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from hwprobe.doctor import Finding, mooncake, traffic
from tests.doctor.wheels import installed
from tests.support.namespaces import End, Line, within

PEER = Path(__file__).with_name("mooncake_peer.py")
SOON = {"MC_TCP_PROGRESS_TIMEOUT_SEC": "2", "MC_TCP_STATUS_TIMEOUT_SEC": "2", "MC_TRANSFER_TIMEOUT": "4"}  # not 30 s
pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment in which it can be imported."""
    place = installed(tmp_path_factory.mktemp("mooncake"), "mooncake-transfer-engine-non-cuda==0.3.13.post1")
    environment = {**os.environ, **SOON, "PYTHONPATH": str(place)}
    tried = subprocess.run(
        [sys.executable, "-c", "import mooncake.engine"], env=environment, capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(
            f"Mooncake cannot be imported (apt-get install libibverbs1): {tried.stderr.strip().splitlines()[-1]}"
        )
    return environment


class Writer:
    """The engine that writes, again and again, and the one that is written to."""

    def __init__(self, process: subprocess.Popen[str], peer: subprocess.Popen[str], log: Path) -> None:
        self.peer = peer
        self._process = process
        self._log = log

    def until(self, word: str) -> None:
        """Its next transfer that ends so."""
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline().strip()) != word:
            assert line, self._log.read_text()

    def told(self) -> list[Finding]:
        """What its log says, now that it has ended."""
        self._process.communicate("\n", timeout=60)
        return mooncake.look([self._log]).findings


@contextmanager
def writing(ends: tuple[End, End], engine: Mapping[str, str], log: Path) -> Iterator[Writer]:
    one, other = ends

    def started(end: End, stderr: int, *words: str) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", end.name, sys.executable, str(PEER), end.address, *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=engine, stdin=pipe, stdout=pipe, stderr=stderr, text=True)

    with log.open("w") as file, started(other, subprocess.DEVNULL) as peer:
        try:
            assert peer.stdout is not None
            port, start = peer.stdout.readline().split()
            with started(one, file.fileno(), f"{other.address}:{port}", start) as process:
                try:
                    yield Writer(process, peer, log)
                finally:
                    process.kill()
        finally:
            peer.kill()


def test_packets_that_are_lost_are_seen_by_the_kernel_alone(
    damaged: tuple[End, End, Line], engine: Mapping[str, str], tmp_path: Path
) -> None:
    one, other, line = damaged
    with writing((one, other), engine, tmp_path / "log") as writer:
        writer.until("done")
        line.drop_every = 10
        examined = within(one.name, lambda: traffic.look(proc=Path("/proc/thread-self")))
        assert [finding.subject for finding in examined.findings] == ["TCP"]
        line.drop_every = 0
        writer.until("done")
        assert writer.told() == []


def test_a_way_that_carries_nothing_any_longer_is_found_in_the_log(
    damaged: tuple[End, End, Line], engine: Mapping[str, str], tmp_path: Path
) -> None:
    one, other, line = damaged
    with writing((one, other), engine, tmp_path / "log") as writer:
        writer.until("done")
        line.drop_every = 1
        writer.until("failed")
        found = {finding.subject: finding for finding in writer.told()}
    assert found["TCP connections"].evidence.endswith("stood still for 2 s and were closed")
    assert found["TCP connections"].severity == "error"


def test_a_peer_that_is_gone_is_found_in_the_log(
    damaged: tuple[End, End, Line], engine: Mapping[str, str], tmp_path: Path
) -> None:
    one, other, _ = damaged
    with writing((one, other), engine, tmp_path / "log") as writer:
        writer.until("done")
        writer.peer.kill()
        writer.until("failed")
        writer.until("failed")
        found = {finding.subject: finding for finding in writer.told()}
    (gone,) = [finding for subject, finding in found.items() if subject.startswith(f"{other.address}:")]
    assert gone.evidence.endswith("the last: Connection refused")
    assert found["TCP connections"].evidence.endswith("ended within a transfer: Connection reset by peer")
