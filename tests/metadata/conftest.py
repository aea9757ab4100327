from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.metadata.credentials import Credentials
from tests.metadata.backends import Backend
from tests.support.zookeeper import Server, running_servers, zookeeper_ensemble, zookeeper_servers


@pytest.fixture(scope="session")
def servers() -> Iterator[list[str]]:
    """Four independent servers, shared: nobody kills these."""
    with zookeeper_servers(4) as addresses:
        yield addresses


@pytest.fixture(scope="session")
def lone_server() -> Iterator[list[str]]:
    with zookeeper_servers(1) as addresses:
        yield addresses


@pytest.fixture(scope="session")
def guarded_server() -> Iterator[list[str]]:
    """One whose entries belong to clients with credentials."""
    with zookeeper_servers(1) as addresses:
        yield addresses


@pytest.fixture(scope="session")
def ensemble() -> Iterator[list[str]]:
    with zookeeper_ensemble(3) as addresses:
        yield addresses


@pytest.fixture
def victim() -> Iterator[Server]:
    """A server of the test's own, to be killed or paused."""
    with running_servers(1) as (server,):
        yield server


@pytest.fixture(params=["embedded", "one_server", "ensemble", "sharded", "authenticated"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    credentials = None
    match request.param:
        case "one_server":
            spec = "zk://" + request.getfixturevalue("lone_server")[0]
        case "ensemble":
            spec = "zk://" + ",".join(request.getfixturevalue("ensemble"))
        case "sharded":
            spec = "zk://" + ";".join(request.getfixturevalue("servers"))
        case "authenticated":
            spec = "zk://" + request.getfixturevalue("guarded_server")[0]
            credentials = Credentials(user="rollart", password="a secret: of tests")
        case _:
            spec = "embedded"
    return Backend(spec, tmp_path, credentials=credentials)
