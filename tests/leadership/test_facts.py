"""What a run tells of itself outlives the session of the leader that told it, once the next one has."""

from __future__ import annotations

from bus.message import NodeAddress
from bus.virtual_time import run
from coordinator.facts import Facts
from coordinator.messages import Join
from coordinator.metadata.simulated import SimulatedServer

ENV = Join(NodeAddress("env-1", "tcp://10.0.0.2:1", "tcp://10.0.0.2:2", 7), ["env"], 1, b"{}")
PROXY = Join(NodeAddress("proxy-1", "tcp://10.0.0.3:1", "tcp://10.0.0.3:2", 8), ["proxy"], 1, b"{}")


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
