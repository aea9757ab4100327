"""``bin/admin shards`` on real servers, while a client goes on."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.metadata import open_sharded
from coordinator.metadata.protocol import Entry
from tests.metadata.backends import run
from tests.support.zookeeper import zookeeper_servers

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240.0


def admin(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "coordinator.commands.admin", "shards", *words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def answered(*words: str) -> dict[str, object]:
    done = admin(*words, "--json", "--yes", "--timeout", "60")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_an_ensemble_is_added_shown_and_removed_under_a_client() -> None:
    async def scenario(first: str, second: str) -> None:
        store = await open_sharded(f"zk://{first}", timeout_s=60.0)
        paths = [f"/jobs/j/nodes/n{number}/a" for number in range(20)]
        for path in paths:
            await store.create(path, b"x", ephemeral=path.endswith("0/a"))
            await store.write(path, b"y")
        home = ["--store", f"zk://{first}"]
        added = await asyncio.to_thread(answered, "add", second, *home)
        assert (added["of"], added["shards"]) == (21, 2)
        shown = await asyncio.to_thread(answered, "show", *home)
        lines = shown["shards"]
        assert isinstance(lines, list)
        assert [(line["id"], line["hosts"], line["home"]) for line in lines] == [
            ("0", first, True),
            ("1", second, False),
        ]
        assert sum(line["prefixes"] for line in lines) == 21
        assert lines[1]["prefixes"] == added["prefixes"]
        await asyncio.to_thread(answered, "remove", "1", *home)
        for path in paths:
            assert await store.get(path) == Entry(path, b"y", 1)
        await store.close()

    with zookeeper_servers(2) as (first, second):
        run(scenario(first, second))


@pytest.mark.parametrize(
    ("words", "expected", "status"),
    [
        (["add", "h:1", "--store", "zk://h:2"], "say --yes", 2),
        (["show", "--store", "embedded"], "one file on one machine, which has no shards", 1),
        (["show", "--store", "zk://127.0.0.1:9", "--timeout", "0.3"], "zk://127.0.0.1:9: no session within 0.3 s", 1),
        (["remove", "--store", "zk://h:2"], "remove: expected one ensemble", 2),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(words: list[str], expected: str, status: int) -> None:
    done = admin(*words)
    assert expected in done.stderr
    assert done.returncode == status
    assert "Traceback" not in done.stderr
