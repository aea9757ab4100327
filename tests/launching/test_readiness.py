"""What a supervisor hears, read from a datagram socket of the test's own, as systemd has one (sd_notify(3))."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.launching.readiness import keep_telling, tell_ready, tell_stopping


@contextmanager
def supervisor(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(address)
        listening.settimeout(10.0)
        yield listening


@pytest.mark.parametrize("abstract", [False, True])
def test_a_supervisor_is_told_of_readiness_and_of_the_end(tmp_path: Path, abstract: bool) -> None:
    name = f"rollart-test-{os.getpid()}"
    bound, told = (f"\0{name}", f"@{name}") if abstract else (str(tmp_path / "n"), str(tmp_path / "n"))
    with supervisor(bound) as listening:
        tell_ready("run a listens", {"NOTIFY_SOCKET": told})
        assert listening.recv(4096) == b"READY=1\nSTATUS=run a listens"
        tell_stopping("ends: done", {"NOTIFY_SOCKET": told})
        assert listening.recv(4096) == b"STOPPING=1\nSTATUS=ends: done"


def test_the_watchdog_is_fed_twice_within_its_time(tmp_path: Path) -> None:
    async def fed(listening: socket.socket, environ: dict[str, str]) -> bytes:
        telling = asyncio.create_task(keep_telling(environ))
        try:
            return await asyncio.to_thread(listening.recv, 4096)
        finally:
            telling.cancel()

    with supervisor(str(tmp_path / "n")) as listening:
        environ = {"NOTIFY_SOCKET": str(tmp_path / "n"), "WATCHDOG_USEC": "100000"}
        assert asyncio.run(fed(listening, environ)) == b"WATCHDOG=1"


def _changed_within(path: Path, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while path.stat().st_mtime == 1.0 and time.monotonic() < deadline:
        time.sleep(0.01)
    return path.stat().st_mtime != 1.0


def test_a_file_is_there_while_the_process_is_ready_and_its_time_is_renewed(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    environ = {"ROLLART_READY_FILE": str(path), "WATCHDOG_USEC": "20000"}

    async def renewed() -> bool:
        telling = asyncio.create_task(keep_telling(environ))
        changed = await asyncio.to_thread(_changed_within, path, 20.0)
        telling.cancel()
        return changed

    tell_ready("env is ready", environ)
    assert path.read_text() == f"{os.getpid()} env is ready\n"
    os.utime(path, (1.0, 1.0))
    assert asyncio.run(renewed())
    tell_stopping("stopped", environ)
    assert not path.exists()


def test_nobody_who_listens_badly_hurts_the_run(tmp_path: Path) -> None:
    environ = {"NOTIFY_SOCKET": str(tmp_path / "gone"), "ROLLART_READY_FILE": str(tmp_path / "no" / "file")}
    tell_ready("ready", environ)
    tell_stopping("stopped", environ)
    assert list(tmp_path.iterdir()) == []
