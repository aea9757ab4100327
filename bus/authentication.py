"""Who is let in, and whose messages are heard: the keys behind a node's connections against its key file.

Invariants: a connection stands only for a key that is on the list (ZAP; a plain one, or one that does not know this
node's key, fails before that), and a message is heard only if its routing id names a node whose key that is. Refusals
are counted, and logged once per peer.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from bus.refusals import Refusals
from bus.security import ClusterKey

KNOWN_AT_MOST = 10_000
"""Verdicts that are kept."""

SERVER_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

PLAIN = "it does not use CURVE"
NOT_FOR_US = "its handshake is not one for this node's key"
BROKEN_OFF = "it went away during its handshake, as plain clients do"

_MISMATCH = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH


class Authentication:
    """Answers libzmq's questions about keys (ZAP, RFC 27) and watches a node's sockets for failed handshakes. Runs on
    the event loop: a node that stands still lets nobody in meanwhile."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], key: ClusterKey, refusals: Refusals) -> None:
        """Before any socket of the context listens. Each node has a context of its own."""
        self._key = key
        self._refusals = refusals
        self._loop = asyncio.get_running_loop()
        self._verdicts: dict[tuple[str, bytes], bool] = {}
        self._readers: dict[zmq.Socket[bytes], zmq.Socket[bytes]] = {}  # by what each reads for
        zap = context.socket(zmq.ROUTER)
        zap.linger = 0
        zap.bind("inproc://zeromq.zap.01")
        self._read(zap, zap, lambda frames: self._answer(zap, frames))

    def _read(
        self, watched: zmq.Socket[bytes], reader: zmq.Socket[bytes], handle: Callable[[list[bytes]], None]
    ) -> None:
        """Take what comes on a socket until nothing is left: its descriptor signals only what is new."""

        def drain() -> None:
            while not reader.closed:
                try:
                    handle(reader.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    return

        self._readers[watched] = reader
        self._loop.add_reader(reader.fileno(), drain)
        self._loop.call_soon(drain)

    # ---- keys ----------------------------------------------------------------------------------------------------

    def _answer(self, zap: zmq.Socket[bytes], frames: list[bytes]) -> None:
        """One question of ZAP: envelope, empty, version, request, domain, address, identity, mechanism, credentials."""
        envelope, _, version, request, _, address, _, mechanism, *credentials = frames
        public = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and credentials else ""
        self._key.refresh()
        listed = bool(public) and self._key.ring().lists(public)
        if not listed:
            who = f"key {public}" if public else "a peer without a key"
            self._refusals.note("refused_keys", f"{who} from {address.decode(errors='replace')}: it is not listed")
        status, text = (b"200", b"") if listed else (b"400", b"key is not listed")
        user = public.encode() if listed else b""
        zap.send_multipart([envelope, b"", version, request, status, text, user, b""])

    def hears(self, first: zmq.Frame) -> bool:
        """Whether a message is heard, by its first frame, the routing id."""
        public = _property(first, "User-Id")
        routing_id = first.bytes
        verdict = self._verdicts.get((public, routing_id))
        if verdict is None:
            if len(self._verdicts) >= KNOWN_AT_MOST:
                self._verdicts.clear()
            verdict = self._verdicts[public, routing_id] = self._may_be(public, routing_id)
        if not verdict:
            name = routing_id.rpartition(b"/")[0].decode(errors="replace")[:100]
            self._refusals.note(
                "refused_names", f"key {public} from {_property(first, 'Peer-Address')} as node {name!r}: not its key"
            )
        return verdict

    def _may_be(self, public: str, routing_id: bytes) -> bool:
        name = routing_id.rpartition(b"/")[0].decode(errors="replace")
        return bool(public) and self._key.ring_of_the_open().may_be(public, name)

    def reconsider(self) -> None:
        """The keys that are good have changed."""
        self._verdicts.clear()

    # ---- handshakes ----------------------------------------------------------------------------------------------

    def watch(self, server: zmq.Socket[bytes]) -> None:
        """Notice what does not come as far as a key."""
        watch = _Handshakes(self._refusals)
        self._read(server, server.get_monitor_socket(SERVER_EVENTS), watch.on_event)

    def watch_client(self, client: zmq.Socket[bytes], on_refused: Callable[[], None]) -> None:
        """Notice that the other end does not let this node in."""
        self._read(client, client.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH), lambda _: on_refused())

    def unwatch(self, watched: zmq.Socket[bytes]) -> None:
        """Before it is closed."""
        reader = self._readers.pop(watched, None)
        if reader is not None:
            self._loop.remove_reader(reader.fileno())
            if reader is not watched:
                watched.disable_monitor()
            reader.close(linger=0)

    def close(self) -> None:
        for watched in list(self._readers):
            self.unwatch(watched)


class _Handshakes:
    """The failed ones of one listening socket. libzmq tells of a failure first, then which descriptor it closed."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._peers: dict[int, str] = {}  # by descriptor
        self._failure = ""

    def on_event(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)
        kind, value = event["event"], event["value"]
        if kind == zmq.EVENT_ACCEPTED:
            self._peers[value] = _host_behind(value, event["endpoint"].decode())
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._failure = PLAIN if value == _MISMATCH else NOT_FOR_US
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._failure = BROKEN_OFF
        elif kind == zmq.EVENT_DISCONNECTED:
            peer = self._peers.pop(value, "an unknown address")
            if self._failure:
                self._refusals.note("refused_handshakes", f"a connection from {peer}: {self._failure}")
                self._failure = ""


def _host_behind(descriptor: int, endpoint: str) -> str:
    """The other end of a connection that libzmq has accepted at an endpoint, unless it is gone already."""
    if endpoint.startswith("ipc://"):
        return "this host"
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.getsockname()[1] != int(endpoint.rpartition(":")[2]):
                return "an unknown address"  # the descriptor is another one's by now
            return str(connection.getpeername()[0])
    except (OSError, ValueError, IndexError):
        return "an unknown address"


def _property(frame: zmq.Frame, name: str) -> str:
    """A property of the connection on which a frame came; empty where it has none."""
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""
