from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.metadata.embedded import FILE, EmbeddedStore
from coordinator.metadata.protocol import Entry, StoreError, StoreTimeout
from tests.metadata.backends import run

HOLDER = """
import asyncio, sys
from pathlib import Path
from coordinator.metadata.embedded import EmbeddedStore

async def main():
    store = await EmbeddedStore.open(Path(sys.argv[1]), timeout_s=10.0)
    await store.create("/jobs/j/kept", b"x")
    await store.create("/jobs/j/alive", b"", ephemeral=True)
    print("open", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_second_opener_is_told_who_has_it_open(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = await EmbeddedStore.open(tmp_path, timeout_s=10.0)
        await first.create("/a", b"x")
        with pytest.raises(StoreError, match=f"process {os.getpid()} has this embedded metadata store open"):
            await EmbeddedStore.open(tmp_path, timeout_s=10.0)
        assert await first.get("/a") == Entry("/a", b"x", 0)
        await first.close()
        second = await EmbeddedStore.open(tmp_path, timeout_s=10.0)
        assert await second.get("/a") == Entry("/a", b"x", 0)
        await second.close()

    run(scenario())


def test_what_a_killed_process_was_told_is_kept_and_its_ephemeral_entries_go(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(StoreError, match=f"process {holder.pid} has"):
            await EmbeddedStore.open(tmp_path, timeout_s=10.0)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        store = await EmbeddedStore.open(tmp_path, timeout_s=10.0)
        assert await store.children("/jobs/j") == ["kept"]
        assert await store.get("/jobs/j/kept") == Entry("/jobs/j/kept", b"x", 0)
        await store.close()

    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"open\n"
            run(scenario())
        finally:
            holder.kill()


def test_a_file_that_is_no_store_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(StoreError, match=f"{tmp_path}.*not a database"):
            await EmbeddedStore.open(tmp_path, timeout_s=10.0)

    (tmp_path / FILE).write_bytes(b"something else entirely" * 100)
    run(scenario())


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(StoreError, match=r"file/below"):
            await EmbeddedStore.open(tmp_path / "file" / "below", timeout_s=10.0)

    (tmp_path / "file").write_text("")
    run(scenario())


def test_a_store_of_a_later_format_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(StoreError, match="format 9"):
            await EmbeddedStore.open(tmp_path, timeout_s=10.0)

    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute("PRAGMA user_version = 9")
    connection.close()
    run(scenario())


def test_a_file_held_by_another_program_is_a_timeout_and_not_a_hang(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await EmbeddedStore.open(tmp_path, timeout_s=2.0)
        await store.create("/a", b"")
        intruder = sqlite3.connect(tmp_path / FILE, isolation_level=None)
        intruder.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreTimeout, match="write /a"):
            await store.write("/a", b"1")
        intruder.execute("ROLLBACK")
        intruder.close()
        assert await store.get("/a") is not None
        await store.close()

    run(scenario())


def test_a_caller_that_gives_up_costs_the_watches_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await EmbeddedStore.open(tmp_path, timeout_s=10.0)
        watch = store.watch("/")
        creating = [asyncio.create_task(store.create(f"/e{number}", b"")) for number in range(20)]
        await asyncio.sleep(0)
        creating[0].cancel()
        creating[19].cancel()
        await asyncio.gather(*creating, return_exceptions=True)
        there = await store.children("/")
        changes = [(await anext(watch)).path for _ in there]
        assert sorted(changes) == [f"/{name}" for name in there]
        await store.close()

    run(scenario())


def test_a_sequence_goes_on_after_a_restart(tmp_path: Path) -> None:
    async def made() -> str:
        store = await EmbeddedStore.open(tmp_path, timeout_s=10.0)
        path = await store.create("/q/e-", b"", sequential=True)
        await store.delete(path)
        await store.close()
        return path

    async def scenario() -> None:
        assert [await made() for _ in range(3)] == ["/q/e-0000000000", "/q/e-0000000001", "/q/e-0000000002"]

    run(scenario())
