"""Who is let in over real sockets: strangers, recordings, plain clients, and keys that change under running nodes."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

import bus.asking
import bus.authentication
import bus.refusals
import bus.ways
import bus.zeromq
from actors.core import Node
from bus import keyring
from bus.answering import Request
from bus.codec import Encoder
from bus.delivery import Courier
from bus.keyring import Pair
from bus.message import DeadlineExceeded, Header, Kind, Lane, NodeAddress, PeerLost
from bus.security import ClusterKey, SecurityError, make_key, read_key
from bus.zeromq import ZeroMQTransport
from tests.bus.test_zeromq import TEXT, Nodes, Text, ask, echo, until
from tests.bus.wiretap import tapped

MARKER = "correct horse battery staple"


@pytest.fixture
def key(tmp_path: Path) -> ClusterKey:
    return make_key(tmp_path / "key")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus.zeromq, "KEYS_EVERY_S", 0.02)
    monkeypatch.setattr(bus.ways, "REFUSED_FOR_S", 1.0)
    monkeypatch.setattr(bus.asking, "RESEND_AFTER_S", 0.2)


def counted(node: Courier, name: str) -> int:
    return node._transport.counters[name]


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "bus.refusals"]


def message(sender: NodeAddress, text: str) -> list[bytes]:
    """Frames of a well-formed tell."""
    header = Header(kind=Kind.TELL, to="x", sender=sender, to_epoch=0, id=0, type="Text")
    return [msgspec.msgpack.encode(header), *(bytes(frame) for frame in Encoder().encode(Text(text)))]


@asynccontextmanager
async def stranger(
    server: Courier | Node, server_key: str, pair: Pair | None, name: str = "stranger"
) -> AsyncIterator[zmq.Socket[bytes]]:
    """A socket that knows the server's public key, with any pair of its own."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.routing_id = f"{name}/1".encode()
        if pair is not None:
            dealer.curve_publickey, dealer.curve_secretkey = pair.public.encode(), pair.secret.encode()
            dealer.curve_serverkey = server_key.encode()
        dealer.connect(server.address.control)
        yield dealer


def address_of(name: str) -> NodeAddress:
    return NodeAddress(name, "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", 1)


# ---- strangers -------------------------------------------------------------------------------------------------------


async def test_an_unlisted_key_is_refused_though_it_knows_the_servers_public_key(
    key: ClusterKey, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[str] = []
    cluster = key.content.pairs[0]
    async with Nodes() as nodes:
        server = nodes("server", lambda request: found.append(request.decode(TEXT).text), key=key)
        pair = keyring.new_pair()
        for attempt in range(1, 4):
            async with stranger(server, cluster.public, pair) as dealer:
                for _ in range(100):
                    dealer.send_multipart(message(address_of("stranger"), "let me in"))
                await until(lambda attempt=attempt: counted(server, "refused_keys") >= attempt)  # type: ignore[misc]
        async with stranger(server, cluster.public, cluster, "listed") as dealer:  # the same socket with a listed key
            dealer.send_multipart(message(address_of("listed"), "hello"))
            await until(lambda: found == ["hello"])
        assert counted(server, "refused_keys") == 3
        assert refusals(caplog) == [
            f"node server refuses key {pair.public} from 127.0.0.1: it is not listed (refused_keys counts it)"
        ]


async def test_refusals_are_seen_in_the_description_of_a_node(key: ClusterKey) -> None:
    async with Node("server", key=key) as node:
        server_key = key.content.pairs[0].public
        async with stranger(node, server_key, keyring.new_pair()) as dealer:
            dealer.send_multipart(message(address_of("stranger"), "let me in"))
            await until(lambda: node.describe()["counters"].get("refused_keys") == 1)


async def test_a_plain_client_is_refused_and_told_of_once(key: ClusterKey, caplog: pytest.LogCaptureFixture) -> None:
    async with Nodes() as nodes:
        server = nodes("server", echo, key=key)
        for attempt in range(1, 11):
            async with stranger(server, "", None, "plain") as dealer:
                for _ in range(20):
                    dealer.send_multipart(message(address_of("plain"), "let me in"))
                await until(lambda attempt=attempt: counted(server, "refused_handshakes") >= attempt)  # type: ignore[misc]
        assert server.peer("plain") is None
    told = refusals(caplog)
    ways = bus.authentication.PLAIN, bus.authentication.BROKEN_OFF  # which end hangs up first is a matter of chance
    assert all(any(f"{way} (refused_handshakes counts it)" in text for way in ways) for text in told)
    assert len(told) == len(set(told)), "each way once, from its address or from one that was gone already"


async def test_a_client_with_another_clusters_key_is_refused(key: ClusterKey, tmp_path: Path) -> None:
    async with Nodes() as nodes:
        server = nodes("server", echo, key=key)
        nodes("other", key=make_key(tmp_path / "other")).tell(server.address, "x", Text("let me in"))
        await until(lambda: counted(server, "refused_handshakes") >= 1)
        assert server.peer("other") is None


async def test_a_node_that_is_not_on_the_list_is_told_so(tmp_path: Path, key: ClusterKey) -> None:
    """Its file has the server's key, but the server's has not its own."""
    listing, own = keyring.add_node(key.content, "guest")
    keyring.create(tmp_path / "guest", own)
    async with Nodes() as nodes:
        server, guest = nodes("server", echo, key=key), nodes("guest", key=read_key(tmp_path / "guest"))
        guest.tell(server.address, "echo", Text("hello"))
        await until(lambda: counted(guest, "refused_by_peers") == 1)
        with pytest.raises(PeerLost, match=r"node server at .* refuses the key of node guest: it is not on its list"):
            await ask(guest, server.address, "hello", timeout_s=0.5)
        keyring.replace(key.path, listing)  # it is listed: no restart is needed on either side
        await asyncio.sleep(bus.ways.REFUSED_FOR_S)
        assert await ask(guest, server.address, "hello", retries=10) == "hello"


def test_the_log_of_refusals_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    counters: Counter[str] = Counter()
    refused = bus.refusals.Refusals("b", counters)
    for number in range(10_000):
        refused.note("refused_keys", f"key {number}")
    assert counters["refused_keys"] == 10_000
    told = refusals(caplog)
    assert len(told) == bus.refusals.TOLD_AT_MOST
    assert told[-1].endswith("further peers that are refused are only counted")


# ---- the wire --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [True, False], ids=["CURVE", "plain"])
async def test_a_tap_on_the_wire_reads_no_text_unless_it_is_plain(key: ClusterKey, secure: bool) -> None:
    found: list[str] = []
    options: dict[str, Any] = {"key": key} if secure else {}
    async with Nodes() as nodes:
        a = nodes("sender-of-secrets", **options)
        b = nodes("b", lambda request: found.append(request.decode(TEXT).text), **options)
        async with tapped(b.address) as tap:
            for _ in range(10):
                a.tell(tap.address, "drawer", Text(MARKER))
            await until(lambda: len(found) == 10)
            seen = tap.all
    assert len(seen) > 10 * len(MARKER)
    for text in (MARKER, "drawer", "sender-of-secrets", a.address.control):
        assert (text.encode() in seen) is not secure, text


@pytest.mark.parametrize("secure", [True, False], ids=["CURVE", "plain"])
async def test_a_replay_of_what_a_node_sent_is_refused_unless_it_is_plain(key: ClusterKey, secure: bool) -> None:
    found: list[str] = []
    options: dict[str, Any] = {"key": key} if secure else {}
    async with Nodes() as nodes:
        a = nodes("a", **options)
        b = nodes("b", lambda request: found.append(request.decode(TEXT).text), **options)
        async with tapped(b.address) as tap:
            a.tell(tap.address, "x", Text("pay 10"))
            await until(lambda: found == ["pay 10"])
            (recording,) = tap.sent
        for _ in range(3):
            await replay(b.address, recording)
        if secure:
            await until(lambda: counted(b, "refused_handshakes") == 3)
            assert found == ["pay 10"]
        else:
            await until(lambda: found == ["pay 10"] * 4)


async def replay(to: NodeAddress, recording: list[bytes]) -> None:
    """Say again what somebody else has said, at the pace at which it was said, until the other end hangs up."""
    host, _, port = to.control.removeprefix("tcp://").rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in recording:
            writer.write(piece)
            await asyncio.sleep(0.1)
    except ConnectionError:
        pass  # it hung up
    finally:
        writer.close()


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_guest(key: ClusterKey, tmp_path: Path) -> tuple[ClusterKey, ClusterKey]:
    """The cluster's key, and the file of its node ``guest``."""
    listing, own = keyring.add_node(key.content, "guest")
    keyring.create(tmp_path / "guest", own)
    keyring.replace(key.path, listing)
    return read_key(key.path), read_key(tmp_path / "guest")


async def test_a_node_with_a_key_of_its_own_talks_to_all_as_itself_and_as_its_children(
    with_guest: tuple[ClusterKey, ClusterKey],
) -> None:
    cluster, own = with_guest
    async with Nodes() as nodes:
        server = nodes("server", echo, key=cluster)
        for name in ("guest", "guest.worker-0"):
            guest = nodes(name, echo, key=own)
            for lane in Lane:
                assert await ask(guest, server.address, "hello", lane=lane) == "hello"
                assert await ask(server, guest.address, "welcome", lane=lane) == "welcome"


@pytest.mark.parametrize("name", ["server", "engine-0", "guest2"])
async def test_a_node_with_a_key_of_its_own_cannot_take_another_name(
    with_guest: tuple[ClusterKey, ClusterKey], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, own = with_guest
    with pytest.raises(SecurityError, match=rf"of node 'guest', and this node is named '{name}': start .*--name guest"):
        bus.zeromq.ZeroMQTransport(name, 1, key=own)
    found: list[str] = []
    (pair,) = own.content.pairs
    async with Nodes() as nodes:
        server = nodes("x", lambda request: found.append(request.decode(TEXT).text), key=cluster)
        server_key = cluster.content.pairs[0].public
        async with stranger(server, server_key, pair, name) as dealer:  # one that does not ask itself
            for _ in range(50):
                dealer.send_multipart(message(address_of(name), "I am another"))
            await until(lambda: counted(server, "refused_names") == 50)
        async with stranger(server, server_key, pair, "guest") as dealer:  # nor hides it in the header
            dealer.send_multipart(message(address_of(name), "I am another"))
            await until(lambda: server.counters["malformed"] == 1)
        assert found == []
        assert server.peer(name) is None
    assert refusals(caplog) == [
        f"node x refuses key {pair.public} from 127.0.0.1 as node {name!r}: not its key (refused_names counts it)"
    ]


async def test_the_clusters_key_cannot_take_the_name_of_a_node_that_has_its_own(
    with_guest: tuple[ClusterKey, ClusterKey],
) -> None:
    cluster, _ = with_guest
    with pytest.raises(SecurityError, match="lists node 'guest' with a key of its own: start it with that file"):
        bus.zeromq.ZeroMQTransport("guest", 1, key=cluster)


async def test_an_address_with_a_false_name_reaches_nobody(with_guest: tuple[ClusterKey, ClusterKey]) -> None:
    """A node that gives its own place out as another's gets nothing that is meant for that one."""
    cluster, own = with_guest
    heard: list[Request] = []
    async with Nodes() as nodes:
        guest, sender = nodes("guest", heard.append, key=own), nodes("sender", key=cluster)
        sender.tell(guest.address, "x", Text("to the guest"))
        await until(lambda: len(heard) == 1)
        false = NodeAddress("server", guest.address.control, guest.address.bulk, 0)
        with pytest.raises(DeadlineExceeded):
            await ask(sender, false, "to the server", timeout_s=0.5)
        assert len(heard) == 1


async def test_a_node_taken_off_the_list_is_no_longer_heard(with_guest: tuple[ClusterKey, ClusterKey]) -> None:
    cluster, own = with_guest
    async with Nodes() as nodes:
        server, guest = nodes("server", echo, key=cluster), nodes("guest", key=own)
        assert await ask(guest, server.address, "hello") == "hello"
        keyring.replace(cluster.path, keyring.remove_node(cluster.content, "guest"))
        await asyncio.sleep(0.1)
        with pytest.raises(DeadlineExceeded):
            await ask(guest, server.address, "still there?", timeout_s=0.3)
        assert counted(server, "refused_names") >= 1


# ---- rotation --------------------------------------------------------------------------------------------------------


class Clock:
    """Time of day, as a test wants it."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def opened(path: Path, clock: Clock) -> ClusterKey:
    return ClusterKey(path, keyring.load(path), clock=clock)


async def test_keys_are_rotated_under_running_nodes_and_the_old_one_is_refused_after_the_overlap(
    key: ClusterKey, tmp_path: Path
) -> None:
    clock = Clock()
    left_behind = tmp_path / "left-behind"  # a host to which the new file is never copied
    keyring.create(left_behind, key.content)
    async with Nodes() as nodes:
        a, b = (nodes(name, echo, key=opened(key.path, clock)) for name in "ab")
        old = nodes("old", echo, key=opened(left_behind, clock))
        assert await ask(a, b.address, "before") == "before"
        keyring.replace(key.path, keyring.rotate(key.content, now=clock.now, overlap_s=3600.0))
        await asyncio.sleep(0.1)  # long enough to have read it
        late = nodes("late", echo, key=opened(key.path, clock))
        for one, other in ((a, b), (a, old), (old, b), (late, old), (old, late), (late, a)):
            assert await ask(one, other.address, "during") == "during"
        clock.now += 3600.0
        await asyncio.sleep(0.2)  # long enough to have changed
        for one, other in ((a, b), (b, a), (late, a), (b, late)):
            assert await ask(one, other.address, "after", retries=10) == "after"
        left = nodes("left", echo, key=opened(left_behind, clock))
        for one, other in ((left, a), (b, left), (old, late)):
            with pytest.raises(DeadlineExceeded):
                await ask(one, other.address, "with the old one", timeout_s=0.3)
        assert counted(a, "refused_handshakes") >= 1
        thief = key.content.pairs[0]  # who has the old key, and knows the new public one
        async with stranger(a, keyring.load(key.path).pairs[-1].public, thief) as dealer:
            dealer.send_multipart(message(address_of("stranger"), "let me in"))
            await until(lambda: counted(a, "refused_keys") == 1)


async def test_a_key_that_changes_again_before_its_node_listens_with_the_last_one_is_changed_too(
    key: ClusterKey,
) -> None:
    clock = Clock()
    async with Nodes() as nodes:
        b = nodes("b", echo, key=opened(key.path, clock))
        a = nodes("a", key=opened(key.path, clock))
        assert await ask(a, b.address, "first key") == "first key"
        transport = b._transport
        assert isinstance(transport, ZeroMQTransport)
        for _ in range(2):  # within one turn of the loop: the ports are not free again yet
            keyring.replace(key.path, keyring.rotate(keyring.load(key.path), now=clock.now, overlap_s=0.0))
            transport._look_at_keys()
        assert await ask(a, b.address, "third key", retries=20) == "third key"
        await until(lambda: not transport._rebinds)


async def test_a_changed_file_that_is_no_good_changes_nothing(
    key: ClusterKey, caplog: pytest.LogCaptureFixture
) -> None:
    async with Nodes() as nodes:
        a, b = nodes("a", key=read_key(key.path)), nodes("b", echo, key=key)
        key.path.write_text("half a fi")
        await asyncio.sleep(0.1)
        assert await ask(a, b.address, "still") == "still"
    told = [record.getMessage() for record in caplog.records if record.name == "bus.security"]
    assert len(told) == 2, "once by each node"
    assert "going on with the keys from before" in told[0]
