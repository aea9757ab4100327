"""A node's connections to its peers over ZeroMQ: a DEALER for each lane of a peer, made when something is first sent.

Invariant: what is sent reaches the node that was addressed (by name, where there are keys) or nobody: a connection is
for one endpoint, lane and key, and is closed once any of them is not that node's any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

import zmq

from bus.authentication import Authentication
from bus.keyring import Pair
from bus.locality import nearest
from bus.message import CONTROL, Lane, NodeAddress, PeerLost
from bus.security import ClusterKey, SecurityError, reachable_plainly, secure_client

log = logging.getLogger(__name__)

IO_THREAD = {Lane.CONTROL: 1, Lane.BULK: 2}
"""By lane, as a bit of ZeroMQ's affinity. One thread for both would let a control message wait, in each direction and
at either end, while it copies a piece of a large one: several milliseconds where gigabytes are under way."""

QUEUED = {Lane.CONTROL: 50_000, Lane.BULK: 1_000}
"""Messages that may wait for a peer, by lane."""

LINGER_MS = 300

REFUSED_FOR_S = 2.0
"""How long nothing is sent to a node that has refused this node's key, before it is tried again."""


class Way(NamedTuple):
    """A connection to a peer."""

    socket: zmq.Socket[bytes]
    name: str  # of the peer, as it was addressed
    place: str  # where it goes: the endpoint itself, or the Unix socket beside it


Where = tuple[str, Lane, str]
"""Endpoint, lane, and the key of who should answer there: an address with a false name reaches nobody."""


class Ways:
    """See the module docstring."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        name: str,
        epoch: int,
        *,
        key: ClusterKey | None,
        doors: Authentication | None,
        counters: Counter[str],
        unix: bool,
    ) -> None:
        """``doors``: with a key. ``unix``: whether to use the Unix sockets of nodes on this host."""
        self.open: dict[Where, Way] = {}
        self._context = context
        self._name = name
        self._routing_id = f"{name}/{epoch}".encode()
        self._key = key
        self._doors = doors
        self._counters = counters
        self._unix = unix
        self._own = ""  # where this node listens
        self._pair: Pair | None = None
        self._server_keys: dict[str, str] = {}  # by name, as the key file is now
        self._refused: dict[Where, float] = {}  # until when
        self._loop = asyncio.get_running_loop()

    def begin(self, own: str, pair: Pair | None) -> None:
        """``own``: where this node listens; ``pair``: with which it speaks."""
        self._own, self._pair = own, pair

    def to(self, peer: NodeAddress, lane: Lane) -> zmq.Socket[bytes]:
        """Raises ``PeerLost`` where nothing can be sent there."""
        endpoint = peer.control if lane is CONTROL else peer.bulk
        where = endpoint, lane, "" if self._key is None else self._server_key(peer.name)
        way = self.open.get(where) or self._connect(peer.name, where)
        return way.socket

    def _server_key(self, name: str) -> str:
        """With which a node must answer; empty without a key file."""
        if self._key is None:
            return ""
        found = self._server_keys.get(name)
        if found is None:
            try:
                found = self._server_keys[name] = self._key.ring().server_key(name)
            except SecurityError as error:
                raise PeerLost(str(error)) from None
        return found

    def _connect(self, name: str, where: Where) -> Way:
        endpoint, lane, server_key = where
        if self._key is None and not reachable_plainly(endpoint):
            raise PeerLost(f"node {name} at {endpoint} is beyond this machine: a key file is needed (--key-file)")
        if self._refused.get(where, 0.0) > self._loop.time():
            raise PeerLost(f"node {name} at {endpoint} refuses the key of node {self._name}: it is not on its list")
        try:
            dealer = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:  # too many
            raise PeerLost(f"cannot connect to node {name} at {endpoint!r}: {error.strerror}") from None
        dealer.routing_id = self._routing_id
        dealer.linger = LINGER_MS
        dealer.affinity = IO_THREAD[lane]
        dealer.sndhwm = QUEUED[lane]
        dealer.ipv6 = endpoint.startswith("tcp://[")
        dealer.reconnect_ivl = 100
        dealer.reconnect_ivl_max = 5_000
        if self._pair is not None and self._doors is not None:
            secure_client(dealer, self._pair, server_key)
            self._doors.watch_client(dealer, lambda: self._on_refused(where))
        way = self.open[where] = Way(dealer, name, self._nearest(endpoint))
        try:
            dealer.connect(way.place)
        except zmq.ZMQError as error:
            self._drop(where, linger_ms=0)
            raise PeerLost(f"cannot connect to node {name} at {endpoint!r}: {error.strerror}") from None
        return way

    def _nearest(self, endpoint: str) -> str:
        return nearest(endpoint, self._own) if self._unix else endpoint

    def _on_refused(self, where: Where) -> None:
        """libzmq gives up a connection whose key is refused: the next message after a while tries anew."""
        way = self.open.get(where)
        if way is not None:
            log.warning("node %s at %s refuses this node's key: it is not on its list", way.name, where[0])
            self._counters["refused_by_peers"] += 1
            self._drop(where, linger_ms=0)
            now = self._loop.time()
            self._refused = {place: until for place, until in self._refused.items() if until > now}
            self._refused[where] = now + REFUSED_FOR_S

    def _drop(self, where: Where, *, linger_ms: int) -> None:
        dealer = self.open.pop(where).socket
        if self._doors is not None:
            self._doors.unwatch(dealer)
        dealer.close(linger=linger_ms)

    def disconnect(self, peer: NodeAddress) -> None:
        """Nothing that waits for it is sent any more."""
        for endpoint, lane in ((peer.control, Lane.CONTROL), (peer.bulk, Lane.BULK)):
            for where in [where for where in self.open if where[:2] == (endpoint, lane)]:
                self._drop(where, linger_ms=0)

    def keep(self, name: str, endpoints: Collection[str]) -> None:
        """Close what does not lead to where a node is now, on the way that is nearest now."""
        for where, way in list(self.open.items()):
            moved = where[0] not in endpoints
            if way.name == name and (moved or way.place not in (where[0], self._nearest(where[0]))):
                self._drop(where, linger_ms=0)

    def forget_keys(self) -> None:
        """The key file may say something else now."""
        self._server_keys.clear()

    def speak_with(self, pair: Pair) -> None:
        """Connect with a pair from now on; connections between other keys than now are closed."""
        changed = self._pair is None or pair.public != self._pair.public
        self._pair = pair
        for where, way in list(self.open.items()):
            if changed or not self._still_answers(way.name, where[2]):
                self._drop(where, linger_ms=LINGER_MS)

    def _still_answers(self, name: str, server_key: str) -> bool:
        try:
            return self._server_key(name) == server_key
        except PeerLost:  # none of its keys is good any more
            return False

    def close(self) -> None:
        """What was sent just now still goes out."""
        for where in list(self.open):
            self._drop(where, linger_ms=LINGER_MS)
