"""What proves that a process is gone, and what does not: real processes, killed and stopped."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from coordinator.pulse import pulse, until_gone

LISTENS = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)"


@contextmanager
def listener() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process that only listens: the kernel takes its connections."""
    words = [sys.executable, "-c", f"{LISTENS}; time.sleep(600)"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, f"127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


async def test_a_killed_process_is_proven_to_be_gone() -> None:
    with listener() as (process, address):
        waiting = asyncio.create_task(until_gone(address))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        process.kill()
        await asyncio.wait_for(waiting, 30.0)


async def test_a_loopback_address_of_another_machine_is_no_place_to_look_for_a_proof() -> None:
    with listener() as (process, address):
        waiting = asyncio.create_task(until_gone(f"{address}@another-boot/4026531840"))
        await asyncio.sleep(0.5)
        process.kill()
        process.wait()
        await asyncio.sleep(1.0)
        assert not waiting.done()
        waiting.cancel()


async def test_a_stopped_process_is_not() -> None:
    with listener() as (process, address):
        waiting = asyncio.create_task(until_gone(address))
        await asyncio.sleep(0.2)
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.0)
        assert not waiting.done()
        waiting.cancel()


async def test_who_never_had_a_connection_takes_no_refusal_for_a_proof() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(until_gone(f"127.0.0.1:{port}"), 1.0)


async def test_a_leader_that_ends_in_good_order_ends_its_pulse() -> None:
    async with pulse("127.0.0.1") as address:
        waiting = asyncio.create_task(until_gone(address))
        await asyncio.sleep(0.2)
        assert not waiting.done()
    assert not [task for task in asyncio.all_tasks() if "hold" in repr(task)]
    await asyncio.wait_for(waiting, 30.0)
