"""Nodes over ZeroMQ: one ROUTER per lane to receive, one DEALER per peer and lane to send.

Invariant: a ROUTER only receives and a DEALER only sends, so that draining the ROUTER's descriptor to EAGAIN never
loses an edge of it. The descriptor is watched by the event loop and drained in batches: no future per message.
Routing ids are ``name/epoch``, fresh for every incarnation, because a ROUTER silently ignores a duplicate id.
Bulk frames are not copied on either side; on the control lane, where messages are small, copying is cheaper.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import zmq

from bus.codec import Frame
from bus.message import CannotListen, Lane, NodeAddress, Overloaded, PeerLost
from bus.security import ClusterKey, check_exposure, secure
from bus.transport import Receive

BATCH = {Lane.CONTROL: 256, Lane.BULK: 16}
"""Messages taken from one socket before the event loop, and so the other lane, gets its turn."""

QUEUED = {Lane.CONTROL: 50_000, Lane.BULK: 1_000}
"""Messages that may wait for a peer, by lane."""

ZERO_COPY_BYTES = 65_536
"""Bulk frames from this size on are handed to ZeroMQ without a copy."""

MAX_FRAME_BYTES = 1 << 30
"""A connection that announces a larger frame is cut, before memory is set aside for it."""

LINGER_MS = 300


class ZeroMQTransport:
    """See ``bus.transport.Transport``."""

    def __init__(
        self, name: str, epoch: int, *, host: str = "127.0.0.1", key: ClusterKey | None = None, port: int = 0
    ) -> None:
        """Bind both lanes on ``host``: control on ``port`` (0 is any free one), bulk on any free one.

        Raises ``SecurityError`` beyond loopback without a key, ``CannotListen`` where the port is taken.
        """
        check_exposure(host, key)
        self._key = key
        self._context = zmq.Context()
        self._routing_id = f"{name}/{epoch}".encode()
        self._routers: dict[Lane, zmq.Socket[bytes]] = {}
        self._dealers: dict[tuple[str, Lane], zmq.Socket[bytes]] = {}
        self._receive: Receive | None = None
        self._loop = asyncio.get_running_loop()
        try:
            endpoints = [self._bind(lane, host, port if lane is Lane.CONTROL else 0) for lane in Lane]
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise CannotListen(f"cannot listen on {host}:{port or '*'}: {zmq.strerror(error.errno or 0)}") from None
        self._address = NodeAddress(name=name, control=endpoints[0], bulk=endpoints[1], epoch=epoch)

    @property
    def address(self) -> NodeAddress:
        return self._address

    def _bind(self, lane: Lane, host: str, port: int) -> str:
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.rcvhwm = QUEUED[lane]
        router.maxmsgsize = MAX_FRAME_BYTES
        router.router_handover = True  # a reconnecting DEALER replaces its own dead connection
        secure(router, self._key, server=True)
        self._routers[lane] = router
        if ":" in host:
            router.ipv6 = True
            host = f"[{host}]"
        router.bind(f"tcp://{host}:{port or '*'}")
        return router.getsockopt_string(zmq.LAST_ENDPOINT)

    def start(self, receive: Receive) -> None:
        self._receive = receive
        for lane, router in self._routers.items():
            self._loop.add_reader(router.fileno(), self._drain, lane)
            self._loop.call_soon(self._drain, lane)  # what came before may have been signalled already

    def _drain(self, lane: Lane) -> None:
        """Deliver what has arrived. The descriptor signals only what is new, so whatever is left needs a call of its
        own, also when a message's delivery raises (which the event loop then reports)."""
        taken = False
        try:
            for _ in range(BATCH[lane]):
                taken = False
                frames = self._take(lane)
                if frames is None or self._receive is None:
                    return
                taken = True
                self._receive(lane, bytes(frames[0]), frames[1:])
        finally:
            if taken and self._receive is not None:
                self._loop.call_soon(self._drain, lane)

    def _take(self, lane: Lane) -> Sequence[Frame] | None:
        router = self._routers.get(lane)
        if router is None:
            return None
        try:
            if lane is Lane.CONTROL:
                return router.recv_multipart(zmq.NOBLOCK)
            return [memoryview(part.buffer) for part in router.recv_multipart(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None

    def send(self, to: NodeAddress, lane: Lane, frames: Sequence[Frame]) -> None:
        if self._receive is None:
            raise PeerLost(f"node {self._address.name} has closed its connections")
        endpoint = to.control if lane is Lane.CONTROL else to.bulk
        dealer = self._dealers.get((endpoint, lane)) or self._connect(to, endpoint, lane)
        largest = max(map(len, frames))
        if largest > MAX_FRAME_BYTES:
            raise ValueError(f"a message with an array of {largest} bytes: at most {MAX_FRAME_BYTES} travel in one")
        try:
            dealer.send_multipart(frames, zmq.NOBLOCK, copy=lane is Lane.CONTROL or largest < ZERO_COPY_BYTES)
        except zmq.Again:
            raise Overloaded(
                f"{QUEUED[lane]} messages already wait for node {to.name} on the {lane.name.lower()} lane"
            ) from None

    def _connect(self, to: NodeAddress, endpoint: str, lane: Lane) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        dealer.routing_id = self._routing_id
        dealer.linger = LINGER_MS
        dealer.sndhwm = QUEUED[lane]
        dealer.ipv6 = endpoint.startswith("tcp://[")
        dealer.reconnect_ivl = 100
        dealer.reconnect_ivl_max = 5_000
        secure(dealer, self._key, server=False)
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            dealer.close(linger=0)
            raise PeerLost(f"cannot connect to node {to.name} at {endpoint!r}: {error.strerror}") from None
        self._dealers[endpoint, lane] = dealer
        return dealer

    def disconnect(self, peer: NodeAddress) -> None:
        for endpoint, lane in ((peer.control, Lane.CONTROL), (peer.bulk, Lane.BULK)):
            dealer = self._dealers.pop((endpoint, lane), None)
            if dealer is not None:
                dealer.close(linger=0)

    def close(self) -> None:
        if self._context.closed:
            return
        self._receive = None
        for router in self._routers.values():
            self._loop.remove_reader(router.fileno())
            router.close(linger=0)
        self._routers.clear()
        for dealer in self._dealers.values():
            dealer.close(linger=LINGER_MS)
        self._dealers.clear()
        self._context.term()
