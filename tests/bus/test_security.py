"""Who may join, and what may be heard from where."""

import os
import socket
from pathlib import Path

import msgspec
import pytest

from bus.keyring import KeyFile, Listed, Pair
from bus.message import DeadlineExceeded, Lane, NodeAddress, PeerLost
from bus.security import ClusterKey, SecurityError, check_exposure, make_key, read_key
from tests.bus.test_zeromq import Nodes, ask, echo


@pytest.fixture
def key(tmp_path: Path) -> ClusterKey:
    return make_key(tmp_path / "key")


# ---- the key file ----------------------------------------------------------------------------------------------------


def test_a_key_file_can_be_read_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    previous = os.umask(0)
    try:
        key = make_key(path)
    finally:
        os.umask(previous)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key(path).content == key.content


def test_an_existing_key_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = make_key(path)
    with pytest.raises(FileExistsError):
        make_key(path)
    assert read_key(path).content == key.content


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_key_file_that_is_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    make_key(path)
    path.chmod(mode)
    with pytest.raises(SecurityError, match=f"mode {mode:o}.*chmod 600"):
        read_key(path)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match=r"key file .*/key: No such file"):
        read_key(tmp_path / "key")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"{}",
        b'{"pairs": [{"public": 1, "secret": 2}], "allow": []}',
        b"\xff\xfe",
        b'{"pairs": [], "allow": []}',
    ],
    ids=["empty", "text", "no lists", "numbers", "not UTF-8", "no keys"],
)
def test_a_file_that_is_no_key_file_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(SecurityError, match="not a key file"):
        read_key(write(tmp_path / "key", content))


def test_keys_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    (first,), (second,) = (make_key(tmp_path / name).content.pairs for name in ("first", "second"))
    mixed = [Pair(first.public, second.secret), Pair("short", "short"), Pair("é" * 40, "é" * 40)]
    for number, pair in enumerate(mixed):
        with pytest.raises(SecurityError, match="do not belong together"):
            read_key(write(tmp_path / f"key-{number}", msgspec.json.encode(KeyFile([pair], [Listed(pair.public)]))))


# ---- exposure --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_may_be_plain(host: str) -> None:
    check_exposure(host, None)


@pytest.mark.parametrize("host", ["192.0.2.2", "10.0.0.1", "fd00::2", "example.com", "eth0", "localhost.example.com"])
def test_anything_else_needs_a_key(host: str, key: ClusterKey) -> None:
    with pytest.raises(SecurityError, match=f"listening on {host} needs a key file"):
        check_exposure(host, None)
    check_exposure(host, key)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", ""])
def test_an_address_that_peers_could_not_be_told_is_refused_with_a_key_as_well(host: str, key: ClusterKey) -> None:
    with pytest.raises(SecurityError, match="name the one address"):
        check_exposure(host, key)
    with pytest.raises(SecurityError, match="needs a key file"):
        check_exposure(host, None)


async def test_a_node_does_not_listen_plainly_beyond_loopback() -> None:
    async with Nodes() as nodes:
        with pytest.raises(SecurityError, match="needs a key file"):
            nodes("a", host="192.0.2.1")


@pytest.mark.parametrize("host", ["192.0.2.1", "[2001:db8::1]", "example.com", "0.0.0.0", ""])
async def test_a_node_says_nothing_plainly_beyond_this_machine(host: str) -> None:
    there = NodeAddress("b", f"tcp://{host}:5600", f"tcp://{host}:5601", 0)
    async with Nodes() as nodes:
        a = nodes("a")
        for lane in Lane:
            with pytest.raises(PeerLost, match=r"node b at tcp://.* is beyond this machine: a key file is needed"):
                await ask(a, there, "in the clear", lane=lane)


def own_address() -> str:
    """One of this machine's addresses beyond loopback; no packet is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address beyond loopback")
        return str(probe.getsockname()[0])


async def test_nodes_with_a_key_talk_beyond_loopback(key: ClusterKey) -> None:
    host = own_address()
    async with Nodes() as nodes:
        a, b = nodes("a", host=host, key=key), nodes("b", echo, host=host, key=key)
        assert await ask(a, b.address, "secret") == "secret"


# ---- CURVE -----------------------------------------------------------------------------------------------------------


async def test_a_node_without_the_key_gets_nothing(key: ClusterKey, tmp_path: Path) -> None:
    async with Nodes() as nodes:
        server = nodes("server", echo, key=key)
        member = nodes("member", key=key)
        strangers = [nodes("plain"), nodes("other", key=make_key(tmp_path / "other"))]
        for stranger in strangers:
            with pytest.raises(DeadlineExceeded):
                await ask(stranger, server.address, "let me in", timeout_s=0.5)
        assert await ask(member, server.address, "hello") == "hello"
        assert server.peer("plain") is None
        assert server.peer("other") is None
        assert server.counters == {}


async def test_a_node_with_the_key_tells_nothing_to_a_plain_one(key: ClusterKey) -> None:
    async with Nodes() as nodes:
        member, plain = nodes("member", key=key), nodes("plain", echo)
        with pytest.raises(DeadlineExceeded):
            await ask(member, plain.address, "secret", timeout_s=0.5)
        assert plain.peer("member") is None


async def test_bulk_is_as_closed_as_control(key: ClusterKey) -> None:
    async with Nodes() as nodes:
        server, plain = nodes("server", echo, key=key), nodes("plain")
        with pytest.raises(DeadlineExceeded):
            await ask(plain, server.address, "let me in", timeout_s=0.5, lane=Lane.BULK)
        assert server.peer("plain") is None
