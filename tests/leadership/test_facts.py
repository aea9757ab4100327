"""What a run tells of itself outlives the session of the leader that told it, once the next one has."""

from __future__ import annotations

import pytest

from bus.message import NodeAddress
from bus.virtual_time import run
from coordinator.facts import Facts, FactsUnreadable, RunStatus
from coordinator.messages import Join
from coordinator.metadata.simulated import SimulatedServer

ENV = Join(NodeAddress("env-1", "tcp://10.0.0.2:1", "tcp://10.0.0.2:2", 7), ["env"], 1, b"{}")
PROXY = Join(NodeAddress("proxy-1", "tcp://10.0.0.3:1", "tcp://10.0.0.3:2", 8), ["proxy"], 1, b"{}")


def test_what_a_run_of_newer_software_has_written_is_refused_by_one_line() -> None:
    async def main() -> None:
        server = SimulatedServer(seed=1)
        store = server.open("store", timeout_s=1.0, session_timeout_s=3.0)
        facts = Facts(store, "r")
        await store.create("/jobs/r/status", b'{"state":"running","version":4}')  # as it was before it had a format
        assert await facts.last_status() == RunStatus("running", 4, 1)
        await store.write("/jobs/r/status", b'{"state":{"of":"another kind"},"version":4,"format":2}')
        with pytest.raises(FactsUnreadable, match=r"^/jobs/r: a run in a metadata store of format 2, of newer .*$"):
            await facts.last_status()
        server.close()

    run(main())


def test_members_that_a_new_leader_has_called_do_not_go_with_the_old_ones_session() -> None:
    async def main() -> None:
        server = SimulatedServer(seed=1)
        first, second = (server.open(name, timeout_s=1.0, session_timeout_s=3.0) for name in ("first", "second"))
        old, new = Facts(first, "r"), Facts(second, "r")
        await old.joined(ENV)
        await old.joined(PROXY)
        await old.status("running", 4)
        await new.joined(ENV)
        server.end_session(first)
        assert await second.children("/members") == ["r.env-1"]
        assert await new.addresses() == [ENV.node, PROXY.node]  # where to look for all of them is not lost with it
        status = await new.last_status()
        assert status is not None
        assert (status.state, status.version) == ("running", 4)
        await new.left("proxy-1")
        await new.left("proxy-1")
        assert await new.addresses() == [ENV.node]
        server.close()

    run(main())
