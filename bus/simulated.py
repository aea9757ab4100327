"""A network in one process, in virtual time: the same faults at the same moments, every time, from one seed.

Invariants:

- a connection (one sender, one receiver's endpoint, one lane) is first in, first out, and each message on it arrives at
  most once, exactly as over TCP, unless ``Link`` asks for ``loss``, ``duplication`` or ``reordering``;
- a message that does not arrive is counted under the reason, and ``on_lost`` is told which it was;
- the same program with the same seed gives the same ``digest``, whatever the hash seed or the machine.

    async def main() -> None:
        network = SimulatedNetwork(seed=7, link=Link(latency_s=0.001))
        async with Node("a", transport=network.join("a")), Node("b", transport=network.join("b")):
            network.partition({"a"}, {"b"})

    bus.virtual_time.run(main())

Nodes are named by what they ``join`` as. A sender that finds nobody listening keeps its messages, as ZeroMQ does, up to
the bound of its queue; whoever comes to listen at that endpoint gets them.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import struct
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from bus.codec import Frame
from bus.message import CannotListen, Lane, NodeAddress, Overloaded, PeerLost
from bus.transport import Receive
from bus.ways import LINGER_MS, QUEUED
from bus.zeromq import MAX_FRAME_BYTES

FRAME_OVERHEAD_BYTES = 9
"""What ZMTP puts before a large frame."""

HANDSHAKE_ROUND_TRIPS = 2
"""TCP's and ZMTP's, before a connection's first message."""

RECONNECT_S = 0.1
"""A sender that waits for a listener notices it after a part of this."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One direction between two nodes, each of their connections by itself."""

    latency_s: float = 0.0001
    jitter_s: float = 0.0  # mean of what is added to the latency, exponentially distributed
    control_bytes_per_s: float = 1e9
    bulk_bytes_per_s: float = 1e9
    loss: float = 0.0  # share of messages
    duplication: float = 0.0  # share of messages that arrive twice
    reordering: float = 0.0  # share of messages that those after them may overtake
    late_s: float = 0.01  # by how much at most, for these and for second arrivals

    def bytes_per_s(self, lane: Lane) -> float:
        return self.control_bytes_per_s if lane is Lane.CONTROL else self.bulk_bytes_per_s


_pack_time = struct.Struct("<d").pack

Frames = Sequence[Frame]
OnLost = Callable[[str, str, Frames], None]
"""Called with the reason, the name of the sender's node and the frames."""


class SimulatedNetwork:
    """See the module docstring. Create inside the running loop."""

    def __init__(
        self,
        *,
        seed: int,
        link: Link | None = None,
        queued: Mapping[Lane, int] | None = None,
        on_lost: OnLost | None = None,
    ) -> None:
        """``queued``: messages that may wait for a peer, by lane; ZeroMQ's bounds by default."""
        self.loop = asyncio.get_running_loop()
        self.random = random.Random(seed)
        self.queued = {**QUEUED, **(queued or {})}
        self.counters: Counter[str] = Counter()
        self._link = link or Link()
        self._links: dict[tuple[str, str], Link] = {}
        self._blocked: set[tuple[str, str]] = set()
        self._listening: dict[str, SimulatedTransport] = {}
        self._connections: dict[_Connection, None] = {}
        self._epochs = itertools.count(1)
        self._ports = itertools.count(50_000)
        self._on_lost = on_lost
        self._digest = hashlib.blake2b(digest_size=16)

    # ---- nodes ---------------------------------------------------------------------------------------------------

    def join(self, name: str, *, epoch: int | None = None, port: int = 0) -> SimulatedTransport:
        """A new incarnation of a node. Its epoch is later than all before it, unless one is given; control listens on
        ``port``, where its predecessor's callers find it again, or on a fresh one. Raises ``CannotListen`` where the
        port is taken."""
        control, bulk = (f"tcp://{name}:{number}" for number in (port or next(self._ports), next(self._ports)))
        if control in self._listening:
            raise CannotListen(f"cannot listen on {control}: Address already in use")
        epoch = next(self._epochs) if epoch is None else epoch
        return SimulatedTransport(self, NodeAddress(name, control, bulk, epoch))

    def listener(self, endpoint: str) -> SimulatedTransport | None:
        return self._listening.get(endpoint)

    def listen(self, transport: SimulatedTransport) -> None:
        """What waits for these endpoints begins to come."""
        for endpoint in (transport.address.control, transport.address.bulk):
            self._listening[endpoint] = transport
            self._resume(endpoint)

    def leave(self, transport: SimulatedTransport, *, linger_s: float, why: str) -> None:
        """What is on its way to a node that ends is lost; what it has to send itself has ``linger_s`` to leave."""
        for endpoint in (transport.address.control, transport.address.bulk):
            if self._listening.get(endpoint) is transport:
                del self._listening[endpoint]
                for connection in self._to(endpoint):
                    connection.stall(why)
        for connection in transport.connections():
            self.drop(connection, linger_s=linger_s, why=why)

    # ---- faults --------------------------------------------------------------------------------------------------

    def set_link(self, source: str, target: str, link: Link) -> None:
        """For messages sent from now on, in this direction."""
        self._links[source, target] = link
        for connection in self._between(source, target):
            connection.change(link)

    def link(self, source: str, target: str) -> Link:
        return self._links.get((source, target), self._link)

    def partition(self, *groups: Collection[str], cut: bool = False) -> None:
        """Nothing passes between nodes of different groups until ``heal``. What is on its way waits too, as with TCP,
        or is lost with its connection (``cut``)."""
        for one, other in itertools.permutations(groups, 2):
            for source, target in itertools.product(sorted(one), sorted(other)):
                self.block(source, target, cut=cut)

    def block(self, source: str, target: str, *, cut: bool = False) -> None:
        """Likewise in one direction between two nodes."""
        self._blocked.add((source, target))
        for connection in self._between(source, target):
            connection.stall("partition" if cut else None)

    def heal(self) -> None:
        """End all partitions."""
        self._blocked.clear()
        for endpoint in list(self._listening):
            self._resume(endpoint)

    def passes(self, source: str, target: str) -> bool:
        return (source, target) not in self._blocked

    def cut(self, source: str, target: str) -> None:
        """Break the connections in one direction: what is on its way is lost, what waits comes over new ones."""
        for connection in self._between(source, target):
            connection.stall("cut")
            connection.resume(self.random.uniform(0, RECONNECT_S))

    # ---- connections ---------------------------------------------------------------------------------------------

    def connect(self, connection: _Connection) -> None:
        self._connections[connection] = None
        connection.resume()

    def drop(self, connection: _Connection, *, linger_s: float = 0.0, why: str) -> None:
        """Let what has left, or leaves in time, arrive, and no more."""
        del self._connections[connection]
        connection.end(linger_s, why)

    def _between(self, source: str, target: str) -> list[_Connection]:
        found: list[_Connection] = []
        for connection in self._connections:
            listener = self._listening.get(connection.endpoint)
            if connection.source == source and listener is not None and listener.address.name == target:
                found.append(connection)
        return found

    def _to(self, endpoint: str) -> list[_Connection]:
        return [connection for connection in self._connections if connection.endpoint == endpoint]

    def _resume(self, endpoint: str) -> None:
        for connection in self._to(endpoint):
            connection.resume(self.random.uniform(0, RECONNECT_S))

    # ---- what happened -------------------------------------------------------------------------------------------

    @property
    def digest(self) -> str:
        """Of every arrival so far: when, from whom, where and what."""
        return self._digest.hexdigest()

    def deliver(self, connection: _Connection, frames: Frames) -> None:
        """Hand a message to whoever listens."""
        listener = self._listening.get(connection.endpoint)
        if listener is None or not self.passes(connection.source, listener.address.name):
            self.lose("nobody listens" if listener is None else "partition", connection.source, frames)
            return
        listener.take(connection, frames)

    def note(self, connection: _Connection, frames: Frames) -> None:
        """It is handed on to its node."""
        self.counters["delivered"] += 1
        self._digest.update(b"".join([_pack_time(self.loop.time()), connection.routing_id, connection.name, *frames]))

    def lose(self, why: str, source: str, frames: Frames) -> None:
        self.counters[f"lost: {why}"] += 1
        if self._on_lost is not None:
            self._on_lost(why, source, frames)


class _Connection:
    """One sender's way to one endpoint on one lane.

    send -> held (nobody listens, or a partition) -> flying (departs when its turn comes, then arrives) -> delivered
    """

    def __init__(self, network: SimulatedNetwork, sender: NodeAddress, endpoint: str, lane: Lane, after: float) -> None:
        """``after``: when the last message of an earlier such connection arrives."""
        self.source = sender.name
        self.routing_id = f"{sender.name}/{sender.epoch}".encode()
        self.endpoint = endpoint
        self.name = endpoint.encode()
        self.lane = lane
        self.last_arrival = after
        self._network = network
        self._loop = network.loop
        self._link: Link | None = None  # None: nobody there
        self._held: deque[Frames] = deque()
        self._flying: deque[tuple[float, float, Frames]] = deque()  # arrival, departure; both grow
        self._leaving: deque[float] = deque()  # departures to come
        self._free_at = 0.0  # when the last departure is over
        self._timer: asyncio.TimerHandle | None = None

    def send(self, frames: Frames, bound: int) -> bool:
        """Whether it was taken: no more than ``bound`` messages wait to leave."""
        leaving, now = self._leaving, self._loop.time()
        while leaving and leaving[0] <= now:
            leaving.popleft()
        if len(self._held) + len(leaving) >= bound:
            return False
        if self._link is None:
            self._held.append(frames)
        else:
            self._fly(frames, self._link)
        return True

    # ---- in the air ----------------------------------------------------------------------------------------------

    def _fly(self, frames: Frames, link: Link) -> None:
        now, chance = self._loop.time(), self._network.random
        if link.loss and chance.random() < link.loss:
            self._network.lose("link", self.source, frames)
            return
        size = sum(map(len, frames)) + FRAME_OVERHEAD_BYTES * len(frames)
        departs = (self._free_at if self._free_at > now else now) + size / link.bytes_per_s(self.lane)
        self._free_at = departs
        self._leaving.append(departs)
        arrives = departs + link.latency_s
        if link.jitter_s:
            arrives += chance.expovariate(1 / link.jitter_s)
        if link.duplication and chance.random() < link.duplication:
            self._network.counters["duplicated"] += 1
            self._stray(arrives + chance.uniform(0, link.late_s), frames)
        if link.reordering and chance.random() < link.reordering:
            self._network.counters["reordered"] += 1
            self._stray(arrives + chance.uniform(0, link.late_s), frames)
            return
        arrives = max(arrives, self.last_arrival)
        self.last_arrival = arrives
        self._flying.append((arrives, departs, frames))
        if self._timer is None:
            self._timer = self._loop.call_at(arrives, self._arrive)

    def _stray(self, when: float, frames: Frames) -> None:
        """Something that is outside the connection's order."""
        self._loop.call_at(when, self._network.deliver, self, frames)

    def _arrive(self) -> None:
        """Deliver what is due; what follows is delivered even where a message's delivery raises, which the event loop
        then reports."""
        flying, now = self._flying, self._loop.time()
        self._timer = None
        try:
            while flying and flying[0][0] <= now:
                self._network.deliver(self, flying.popleft()[2])
        finally:
            if flying and self._timer is None:
                self._timer = self._loop.call_at(flying[0][0], self._arrive)

    # ---- disruptions ---------------------------------------------------------------------------------------------

    def stall(self, why: str | None) -> None:
        """Nothing arrives until ``resume``. What has departed is lost for this reason, or (None) waits."""
        now = self._loop.time()
        back = [(departs, frames) for _, departs, frames in self._flying]
        self._clear()
        self._link = None
        held = [frames for departs, frames in back if why is None or departs > now]
        self._held.extendleft(reversed(held))
        for departs, frames in back:
            if why is not None and departs <= now:
                self._network.lose(why, self.source, frames)

    def resume(self, after_s: float = 0.0) -> None:
        """Send what waits, if there is somebody to send it to."""
        listener = self._network.listener(self.endpoint)
        if self._link is not None or listener is None or not self._network.passes(self.source, listener.address.name):
            return
        self._link = link = self._network.link(self.source, listener.address.name)
        self._free_at = self._loop.time() + after_s + HANDSHAKE_ROUND_TRIPS * 2 * link.latency_s
        while self._held:
            self._fly(self._held.popleft(), link)

    def change(self, link: Link) -> None:
        """For what is sent from now on, if there is somebody to send to."""
        if self._link is not None:
            self._link = link

    def end(self, linger_s: float, why: str) -> None:
        """Nobody sends here any more; what has departed by then still arrives, in order."""
        limit = self._loop.time() + linger_s
        kept = [flight for flight in self._flying if flight[1] <= limit]
        lost = [flight[2] for flight in self._flying if flight[1] > limit]
        self._clear()
        for frames in [*lost, *self._held]:
            self._network.lose(why, self.source, frames)
        self._held.clear()
        for arrives, _, frames in kept:
            self._stray(arrives, frames)

    def _clear(self) -> None:
        self._flying.clear()
        self._leaving.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class SimulatedTransport:
    """See ``bus.transport.Transport``; made by ``SimulatedNetwork.join``."""

    def __init__(self, network: SimulatedNetwork, address: NodeAddress) -> None:
        self._network = network
        self._address = address
        self._receive: Receive | None = None
        self._counters: Counter[str] = Counter()
        self._over = ""
        self._come: dict[Lane, deque[tuple[_Connection, Frames]]] = {lane: deque() for lane in Lane}
        self._connections: dict[tuple[str, Lane], _Connection] = {}
        self._names: dict[tuple[str, Lane], str] = {}  # as whom each was connected to
        self._dropped: dict[
            tuple[str, Lane], float
        ] = {}  # connections of which something is still to arrive: until when

    @property
    def address(self) -> NodeAddress:
        return self._address

    @property
    def counters(self) -> Counter[str]:
        """Nothing is refused here; what became of messages is counted by the network."""
        return self._counters

    def start(self, receive: Receive) -> None:
        self._receive = receive
        self._network.listen(self)

    def take(self, connection: _Connection, frames: Frames) -> None:
        """What comes on a lane in one moment, from whomever, is handed on in one go, as it is from a real socket."""
        come = self._come[connection.lane]
        if not come:
            self._network.loop.call_soon(self._hand_on, connection.lane)
        come.append((connection, frames))

    def _hand_on(self, lane: Lane) -> None:
        """The rest follows also where a message's delivery raises, which the event loop then reports."""
        come = self._come[lane]
        try:
            while come and self._receive is not None:
                connection, frames = come.popleft()
                self._network.note(connection, frames)
                self._receive(lane, connection.routing_id, frames, more=bool(come))
        finally:
            if come:
                self._network.loop.call_soon(self._hand_on, lane)

    def send(self, to: NodeAddress, lane: Lane, frames: Frames) -> None:
        if self._receive is None:
            raise PeerLost(f"node {self._address.name} has {self._over or 'not started'}")
        endpoint = to.control if lane is Lane.CONTROL else to.bulk
        connection = self._connections.get((endpoint, lane)) or self._connect(to, endpoint, lane)
        largest = max(map(len, frames))
        if largest > MAX_FRAME_BYTES:
            raise ValueError(f"a message with an array of {largest} bytes: at most {MAX_FRAME_BYTES} travel in one")
        # The sender may change its arrays from now on. Of what is bytes already, this makes no copy.
        copies: list[Frame] = [bytes(frame) for frame in frames]
        bound = self._network.queued[lane]
        if not connection.send(copies if lane is Lane.CONTROL else [memoryview(copy) for copy in copies], bound):
            raise Overloaded(f"{bound} messages already wait for node {to.name} on the {lane.name.lower()} lane")

    def _connect(self, to: NodeAddress, endpoint: str, lane: Lane) -> _Connection:
        if not endpoint.startswith("tcp://"):
            raise PeerLost(f"cannot connect to node {to.name} at {endpoint!r}: Invalid argument")
        after = self._dropped.pop((endpoint, lane), 0.0)
        self._names[endpoint, lane] = to.name
        connection = self._connections[endpoint, lane] = _Connection(
            self._network, self._address, endpoint, lane, after
        )
        self._network.connect(connection)
        return connection

    def connections(self) -> list[_Connection]:
        return list(self._connections.values())

    def disconnect(self, peer: NodeAddress) -> None:
        self._disconnect([(peer.control, Lane.CONTROL), (peer.bulk, Lane.BULK)])

    def expect(self) -> None:
        """In virtual time nobody sleeps."""

    def news(self) -> bool:
        """What has come is delivered at that moment."""
        return False

    def keep(self, name: str, endpoints: Collection[str]) -> None:
        self._disconnect([key for key, known in self._names.items() if known == name and key[0] not in endpoints])

    def _disconnect(self, keys: list[tuple[str, Lane]]) -> None:
        for key in keys:
            connection = self._connections.pop(key, None)
            if connection is not None:
                del self._names[key]
                self._network.drop(connection, why="disconnected")
                self._dropped[key] = connection.last_arrival
        now = self._network.loop.time()
        self._dropped = {key: until for key, until in self._dropped.items() if until > now}

    def close(self) -> None:
        self._end("closed its connections", linger_s=LINGER_MS / 1000, why="closed")

    def crash(self) -> None:
        """End as a process ends that is killed: it sends and hears nothing more, and takes no leave."""
        self._end("crashed", linger_s=0.0, why="crashed")

    def _end(self, how: str, *, linger_s: float, why: str) -> None:
        if self._over:
            return
        self._over = how
        self._receive = None
        for come in self._come.values():
            for connection, frames in come:
                self._network.lose(why, connection.source, frames)
            come.clear()
        self._network.leave(self, linger_s=linger_s, why=why)
        self._connections.clear()
