from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.metadata import open_store, parse_spec
from tests.metadata.backends import run


@pytest.mark.parametrize(
    ("spec", "ensembles"),
    [
        ("embedded", ()),
        ("zk://h1:2181", ("h1:2181",)),
        ("zk://h1:2181,h2:2182", ("h1:2181,h2:2182",)),
        ("zk://h1:2181;h2:2181", ("h1:2181", "h2:2181")),
        ("zk://10.0.0.1:1,zoo-2.cell_a:65535;[::1]:2181", ("10.0.0.1:1,zoo-2.cell_a:65535", "[::1]:2181")),
    ],
)
def test_a_spec_names_ensembles_home_first(spec: str, ensembles: tuple[str, ...]) -> None:
    assert parse_spec(spec) == ensembles


@pytest.mark.parametrize(
    ("spec", "culprit"),
    [
        ("", "''"),
        ("Embedded", "'Embedded'"),
        ("etcd://h1:2379", "'etcd://h1:2379'"),
        ("zk://", "'' is not host:port"),
        ("zk://h1", "'h1' is not host:port"),
        ("zk://h1:2181,", "'' is not host:port"),
        ("zk://h1:2181;;h2:2181", "'' is not host:port"),
        ("zk://h1:0", "'h1:0' is not host:port"),
        ("zk://h1:65536", "'h1:65536' is not host:port"),
        ("zk://h1:2181, h2:2181", "' h2:2181' is not host:port"),
        ("zk://h1:2181/chroot", "'h1:2181/chroot' is not host:port"),
        ("zk://h1:2181;h1:2181", "h1:2181 is named twice"),
    ],
)
def test_a_bad_spec_is_refused_with_what_was_expected(spec: str, culprit: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(ValueError, match='expected "embedded", or "zk://') as refused:
            await open_store(spec, directory=tmp_path, timeout_s=1.0)
        assert culprit in str(refused.value)

    run(scenario())


def test_the_embedded_store_needs_no_kazoo(tmp_path: Path) -> None:
    program = f"""
import asyncio, pathlib, sys
sys.modules["kazoo"] = None  # an import of it fails
from coordinator.metadata import open_store
from coordinator.metadata.protocol import StoreError

async def main():
    store = await open_store("embedded", directory=pathlib.Path({str(tmp_path)!r}), timeout_s=10.0)
    print(await store.create("/a", b""))
    await store.close()
    try:
        await open_store("zk://h1:2181", directory=pathlib.Path({str(tmp_path)!r}), timeout_s=10.0)
    except StoreError as error:
        print(error)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    created, refused = done.stdout.splitlines()
    assert created == "/a"
    assert refused.startswith("zk://h1:2181: a ZooKeeper store needs the package kazoo")
