"""Nodes of one host find each other's Unix sockets, and nobody is misled by one."""

import socket
from pathlib import Path

import pytest
import zmq

from bus.locality import nearest, unix_endpoint
from bus.message import CannotListen, Lane
from bus.security import make_key
from bus.zeromq import ZeroMQTransport
from tests.bus.test_zeromq import Nodes, ask, echo, until
from tests.support.ports import free_port


def ways(transport: object) -> set[str]:
    """The schemes of a node's connections."""
    assert isinstance(transport, ZeroMQTransport)
    found = (way.socket.getsockopt_string(zmq.LAST_ENDPOINT) for way in transport._ways.open.values())
    return {endpoint.partition("://")[0] for endpoint in found}


@pytest.mark.parametrize(
    ("asker", "answerer", "scheme"), [(True, True, "ipc"), (True, False, "tcp"), (False, True, "tcp")]
)
async def test_nodes_of_a_host_speak_over_unix_sockets_where_both_have_them(
    asker: bool, answerer: bool, scheme: str
) -> None:
    async with Nodes() as nodes:
        a, b = nodes("a", unix=asker), nodes("b", echo, unix=answerer)
        for lane in Lane:
            assert await ask(a, b.address, "hello", lane=lane) == "hello"
        assert ways(a._transport) == {scheme}


async def test_a_node_that_is_back_without_its_unix_socket_is_answered_once_it_is_heard() -> None:
    port = free_port()
    async with Nodes() as nodes:
        a, b = nodes("a", echo), nodes("b", port=port)
        assert await ask(b, a.address, "first") == "first"
        assert ways(a._transport) == {"ipc"}
        b._transport.close()  # as if killed: it takes no leave
        again = nodes("b", epoch=2, port=port, unix=False)
        assert await ask(again, a.address, "second") == "second"
        assert ways(a._transport) == {"tcp"}


async def test_a_socket_is_gone_with_its_node_and_leaves_no_name() -> None:
    async with Nodes() as nodes:
        endpoint = nodes("a").address.control
        assert nearest(endpoint, endpoint) == unix_endpoint(endpoint)
    assert nearest(endpoint, endpoint) == endpoint


def test_only_this_host_is_looked_for_on_this_host() -> None:
    with socket.socket(socket.AF_UNIX) as false:
        false.bind("\0rollart-192.0.2.1:5555")
        false.listen()
        there = "tcp://192.0.2.1:5555"
        assert nearest(there, "tcp://127.0.0.1:1") == there
        assert nearest(there, "tcp://192.0.2.2:1") == there
        assert nearest(there, "tcp://192.0.2.1:1") == "ipc://@rollart-192.0.2.1:5555"


async def test_a_node_does_not_come_up_where_another_has_its_socket() -> None:
    port = free_port()
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(f"\0rollart-127.0.0.1:{port}")
        with pytest.raises(CannotListen, match=f"127.0.0.1:{port}: Address already in use"):
            ZeroMQTransport("a", 1, port=port)


async def test_a_plain_client_is_refused_on_the_unix_socket_as_well(tmp_path: Path) -> None:
    key = make_key(tmp_path / "key")
    async with Nodes() as nodes:
        server = nodes("server", echo, key=key)
        with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
            plain.linger = 0
            plain.connect(unix_endpoint(server.address.control) or "")
            plain.send(b"let me in")
            await until(lambda: server._transport.counters["refused_handshakes"] >= 1)
