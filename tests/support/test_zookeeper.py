from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.support.zookeeper import ServerFailed, mode_of, running_servers

HOLDER = """
import time
from tests.support.zookeeper import running_servers
with running_servers(1) as (server,):
    print(server.address, flush=True)
    time.sleep(600)
"""


def test_a_missing_server_is_an_error_that_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ServerFailed, match=r"java.*apt-get install .*zookeeper"), running_servers(1):
        pytest.fail("a server without java")


def test_a_killed_run_leaves_no_server() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        address = holder.stdout.readline().strip()
        assert mode_of(address) == "standalone"
        holder.kill()
        holder.wait()
        deadline = time.monotonic() + 10
        while mode_of(address) is not None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert mode_of(address) is None
