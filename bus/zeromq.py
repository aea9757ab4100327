"""Nodes over ZeroMQ: one ROUTER per lane to receive, one DEALER per peer and lane to send.

Invariant: a ROUTER only receives and a DEALER only sends, so that draining the ROUTER's descriptor to EAGAIN never
loses an edge of it. The descriptor is watched by the event loop and drained in batches: no future per message.
Routing ids are ``name/epoch``, fresh for every incarnation, because a ROUTER silently ignores a duplicate id.
Large bulk frames are not copied on either side; a small message travels as one packed frame (``bus.packing``). Bulk
delays control nowhere: each lane has an I/O thread of its own, and the loop looks for control before it takes bulk.

With a key file every connection is CURVE's, is let in and heard as ``bus.authentication`` says, and is made anew when
the keys of its ends change: what is on its way just then can get lost, as when a connection breaks.
"""

from __future__ import annotations

import asyncio
import logging
import select
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import zmq
from zmq.backend import Socket as PlainSocket
from zmq.backend import zmq_poll

from bus.authentication import Authentication
from bus.bounds import MAX_FRAMES
from bus.codec import Frame
from bus.eager import Eager
from bus.keyring import Pair
from bus.locality import unix_endpoint
from bus.message import BULK, CONTROL, CannotListen, Lane, NodeAddress, Overloaded, PeerLost
from bus.packing import HEAD_BYTES, packed, unpacked
from bus.refusals import Refusals
from bus.security import (
    ClusterKey,
    SecurityError,
    check_exposure,
    check_name,
    secure_server,
)
from bus.transport import Receive
from bus.ways import IO_THREAD, QUEUED, Ways

log = logging.getLogger(__name__)

BATCH = {Lane.CONTROL: 256, Lane.BULK: 16}
"""Messages taken from one socket before the event loop gets its turn; of bulk, fewer where control has come."""

ZERO_COPY_BYTES = 65_536
"""Bulk frames from this size on are handed to ZeroMQ without a copy."""

COPIED_BYTES = 65_536
"""Messages of one part up to this size are copied when they arrive, which makes them cheaper to take apart."""

MAX_FRAME_BYTES = 1 << 30
"""A connection that announces a larger frame is cut, before memory is set aside for it."""

MAX_SOCKETS = 32_768
"""Of one node: two for each peer, and twice that with a key file. ZeroMQ's default is 1,023."""

CURVE_BYTES = 33
"""What encryption adds to a frame (RFC 26: the command's name, a nonce, the flags, a MAC)."""

KEPT_FREE_BYTES = (32 << 20) - (64 << 10)
"""glibc gives memory back to the kernel as soon as twice the size of the largest mapped piece that was ever freed is
unused, of pieces of up to 32 MiB. Before one has been, received arrays of a megabyte are freed and faulted in anew all
the time, which costs more than a third of receiving them."""

KEYS_EVERY_S = 1.0
"""How often the key file is looked at."""

REBIND_EVERY_S = 0.05
"""How often a lane whose key has changed tries to listen again: its old connections take a moment to close."""

REBINDS_UNTIL_TOLD = 100

_NOW = int(zmq.NOBLOCK)  # flags as plain numbers: an enum's cost shows at tens of thousands of messages a second
_READABLE = int(zmq.POLLIN)
_send, _recv = PlainSocket.send, PlainSocket.recv  # without the layer above, of what is not used here


_Message = tuple[bytes, list[Frame]]
"""Routing id and frames; none of them if its sender is not who it says."""


class ZeroMQTransport:
    """See ``bus.transport.Transport``."""

    def __init__(
        self,
        name: str,
        epoch: int,
        *,
        host: str = "127.0.0.1",
        key: ClusterKey | None = None,
        port: int = 0,
        unix: bool = True,
        eager: bool = True,
    ) -> None:
        """Bind both lanes on ``host``: control on ``port`` (0 is any free one), bulk on any free one. With ``unix``,
        nodes of this host are also heard, and spoken to, over Unix sockets (``bus.locality``). ``eager``: look for
        answers before going to sleep (``bus.eager``).

        Raises ``SecurityError`` beyond loopback without a key, ``CannotListen`` where the port is taken.
        """
        check_exposure(host, key)
        np.empty(KEPT_FREE_BYTES, np.uint8)  # mapped, and freed at once: no page of it is touched
        self._name = name
        self._unix = unix
        self._key = key
        self._pair = check_name(name, key) if key is not None else None
        self._counters: Counter[str] = Counter()
        self._context = zmq.Context(len(IO_THREAD))
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._routers: dict[Lane, zmq.Socket[bytes]] = {}
        self._receive: Receive | None = None
        self._ahead: dict[Lane, _Message] = {}  # taken, and not delivered yet
        self._due: set[Lane] = set()  # lanes that are drained in the next turn of the loop
        self._company = False  # whether messages came together, which are handled in the next turn of the loop
        self._rebinds: dict[str, asyncio.TimerHandle] = {}  # by endpoint, of those that are not free again yet
        self._loop = asyncio.get_running_loop()
        self._eager = Eager(self._loop, self._look) if eager else None
        self._signals = select.poll()  # the control lane's descriptor
        self._all_signals = select.poll()  # both lanes', for a thread of its own
        self._refusals = Refusals(name, self._counters)
        self._doors = Authentication(self._context, key, self._refusals) if key is not None else None
        self._ways = Ways(self._context, name, epoch, key=key, doors=self._doors, counters=self._counters, unix=unix)
        try:
            endpoints = [self._listen(lane, host, port if lane is Lane.CONTROL else 0) for lane in Lane]
        except zmq.ZMQError as error:
            self._close_sockets()
            raise CannotListen(f"cannot listen on {host}:{port or '*'}: {zmq.strerror(error.errno or 0)}") from None
        self._address = NodeAddress(name=name, control=endpoints[0], bulk=endpoints[1], epoch=epoch)
        self._ways.begin(self._address.control, self._pair)
        self._timer = self._loop.call_soon(self._look_at_keys) if key is not None else None

    @property
    def address(self) -> NodeAddress:
        return self._address

    @property
    def counters(self) -> Counter[str]:
        return self._counters

    def _listen(self, lane: Lane, host: str, port: int) -> str:
        router = self._context.socket(zmq.ROUTER)
        self._routers[lane] = router
        router.linger = 0
        router.affinity = IO_THREAD[lane]
        router.rcvhwm = QUEUED[lane]
        router.maxmsgsize = MAX_FRAME_BYTES + HEAD_BYTES + CURVE_BYTES
        router.router_handover = True  # a reconnecting DEALER replaces its own dead connection
        if self._pair is not None and self._doors is not None:
            secure_server(router, self._pair)
            self._doors.watch(router)
        if ":" in host:
            router.ipv6 = True
            host = f"[{host}]"
        router.bind(f"tcp://{host}:{port or '*'}")
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        for beside in self._places(endpoint)[1:]:
            router.bind(beside)
        return endpoint

    def _places(self, endpoint: str) -> list[str]:
        """Where a lane listens: at its endpoint on TCP, and at the Unix socket beside it."""
        beside = unix_endpoint(endpoint) if self._unix else None
        return [endpoint] if beside is None else [endpoint, beside]

    def start(self, receive: Receive) -> None:
        self._receive = receive
        self._signals.register(self._routers[Lane.CONTROL].fileno(), select.POLLIN)
        for router in self._routers.values():
            self._all_signals.register(router.fileno(), select.POLLIN)
        for lane, router in self._routers.items():
            self._loop.add_reader(router.fileno(), self._on_readable, lane)
            self._drain_soon(lane)  # what came before may have been signalled already

    def _on_readable(self, lane: Lane) -> None:
        """Nothing to do where a call is due already: were there another one for every signal, the calls of a turn of
        the loop, and so its length, would grow as long as messages keep coming."""
        if lane not in self._due:
            self._drain(lane)

    def _drain_soon(self, lane: Lane) -> None:
        self._due.add(lane)
        self._loop.call_soon(self._drain, lane)

    def _drain(self, lane: Lane) -> None:
        """Deliver what has arrived. The descriptor signals only what is new, so whatever is left needs a call of its
        own, also when a message's delivery raises (which the event loop then reports)."""
        self._due.discard(lane)
        rest = True
        try:
            for taken in range(BATCH[lane]):
                if lane is BULK and self._has_come(CONTROL):
                    self._on_readable(CONTROL)
                    if taken:  # the rest comes in the next turn, behind what control has set off
                        return
                message = self._ahead.pop(lane, None) or self._take(lane)
                # Behind one there is often no other, and to ask costs less than to receive nothing. Behind several
                # there are usually more.
                following = self._take(lane) if taken or self._has_come(lane) else None
                rest = following is not None
                if following is not None:
                    self._ahead[lane] = following
                    self._company = True
                if message is not None and self._receive is not None:
                    routing_id, frames = message
                    if frames:
                        self._receive(lane, routing_id, frames, more=rest)
                if not rest:
                    return
        finally:
            if self._company:
                self._loop.call_soon(self._dealt_with)
            if rest and self._receive is not None:
                self._drain_soon(lane)

    def expect(self) -> None:
        if self._eager is not None:
            self._eager.expect()

    def news(self) -> bool:
        return self._company or bool(self._due) or bool(self._all_signals.poll(0))

    def _dealt_with(self) -> None:
        """Called behind those whom the messages of a call have woken up."""
        self._company = False

    def _look(self) -> bool:
        """Deliver control that has come; whether any had."""
        if not self._signals.poll(0):
            return False
        self._on_readable(CONTROL)
        return True

    def _has_come(self, lane: Lane) -> bool:
        """Who asks must see to it that it is drained: the descriptor no longer signals what was seen."""
        router = self._routers.get(lane)
        return router is not None and bool(zmq_poll([(router, _READABLE)], 0))

    def _take(self, lane: Lane) -> _Message | None:
        """What has come next, if anything has; it is received until nothing is left, since to look first costs more
        than a message."""
        router = self._routers.get(lane)
        if router is None:
            return None
        copy, heard = lane is CONTROL, True
        try:
            if self._doors is None:
                routing_id = _recv(router, _NOW)
            else:
                first = _recv(router, _NOW, False)
                routing_id, heard = first.bytes, self._doors.hears(first)
        except zmq.Again:
            return None
        part = _recv(router, _NOW, False)  # as a frame, since that knows whether it is the last one
        if not part.more:
            whole = part.bytes if len(part) <= COPIED_BYTES else part.buffer
            return routing_id, unpacked(whole) if heard else []
        parts: list[Frame] = [part.bytes if copy else part.buffer]
        while part.more:
            part = _recv(router, _NOW, False)
            if len(parts) <= MAX_FRAMES:  # else it is refused for their number
                parts.append(part.bytes if copy else part.buffer)
        return routing_id, parts if heard else []

    def send(self, to: NodeAddress, lane: Lane, frames: Sequence[Frame]) -> None:
        if self._receive is None:
            raise PeerLost(f"node {self._address.name} has closed its connections")
        socket = self._ways.to(to, lane)
        part = packed(frames)
        if part is None or len(part) > MAX_FRAME_BYTES:
            _check_sizes(frames)
        try:
            if part is not None:
                _send(socket, part, _NOW)
            else:
                copy = lane is CONTROL or max(map(len, frames)) < ZERO_COPY_BYTES
                socket.send_multipart(frames, _NOW, copy=copy)
        except zmq.Again:
            raise Overloaded(
                f"{QUEUED[lane]} messages already wait for node {to.name} on the {lane.name.lower()} lane"
            ) from None

    def disconnect(self, peer: NodeAddress) -> None:
        self._ways.disconnect(peer)

    def keep(self, name: str, endpoints: Collection[str]) -> None:
        self._ways.keep(name, endpoints)

    # ---- keys that change ----------------------------------------------------------------------------------------

    def _look_at_keys(self) -> None:
        """Every second, and when a key retires."""
        if self._key is None or self._doors is None or self._context.closed:
            return
        self._key.refresh()
        self._doors.reconsider()
        self._ways.forget_keys()
        try:
            self._speak_with(check_name(self._name, self._key))
        except SecurityError as error:
            self._refusals.note("unusable_keys", f"its own key: {error}")
        change_s = self._key.next_change_s()
        self._timer = self._loop.call_later(
            KEYS_EVERY_S if change_s is None else min(change_s, KEYS_EVERY_S), self._look_at_keys
        )

    def _speak_with(self, pair: Pair) -> None:
        """Answer and connect with a pair from now on; connections between other keys than now are closed."""
        changed = self._pair is None or pair.public != self._pair.public
        self._pair = pair
        self._ways.speak_with(pair)
        if not changed:
            return
        for lane, endpoint in ((Lane.CONTROL, self._address.control), (Lane.BULK, self._address.bulk)):
            for place in self._places(endpoint):
                if place in self._rebinds:
                    self._rebinds.pop(place).cancel()
                else:
                    self._routers[lane].unbind(place)
            secure_server(self._routers[lane], pair)
            for place in self._places(endpoint):
                self._rebind(lane, place)

    def _rebind(self, lane: Lane, endpoint: str, attempt: int = 1) -> None:
        self._rebinds.pop(endpoint, None)
        try:
            self._routers[lane].bind(endpoint)
        except zmq.ZMQError as error:
            if attempt % REBINDS_UNTIL_TOLD == 0:
                log.error("cannot listen at %s again with the new key: %s; still trying", endpoint, error.strerror)
            again = self._loop.call_later(REBIND_EVERY_S, self._rebind, lane, endpoint, attempt + 1)
            self._rebinds[endpoint] = again

    # ---- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._context.closed:
            return
        self._receive = None
        if self._eager is not None:
            self._eager.close()
        for router in self._routers.values():
            self._loop.remove_reader(router.fileno())
        for timer in (self._timer, *self._rebinds.values()):
            if timer is not None:
                timer.cancel()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for router in self._routers.values():
            if self._doors is not None:
                self._doors.unwatch(router)
            router.close(linger=0)
        self._routers.clear()
        self._ways.close()
        if self._doors is not None:
            self._doors.close()
        self._context.term()


def _check_sizes(frames: Sequence[Frame]) -> None:
    largest = max(map(len, frames))
    if largest > MAX_FRAME_BYTES:
        raise ValueError(f"a message with an array of {largest} bytes: at most {MAX_FRAME_BYTES} travel in one")
