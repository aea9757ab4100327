"""Puts messages on the transport and counts what could not be sent.

Invariant: nothing goes to an incarnation that is known to be gone, and ``try_send``, the way in which everything is
sent that nobody waits for, never raises.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from bus.bounds import check_message
from bus.codec import Encoder, Frame
from bus.message import PROTOCOL_VERSION, BusError, Header, Kind, Lane, NodeAddress
from bus.peers import Peers
from bus.tracing import Traces
from bus.transport import Transport

SUPERSEDED_S = 5.0
"""How long a connection stays over which an incarnation was told that it is out of use."""


class Wire:
    """One node's way out."""

    def __init__(self, transport: Transport, peers: Peers, protocol: int = PROTOCOL_VERSION) -> None:
        self.address = transport.address
        self.counters: Counter[str] = Counter()
        self._protocol = protocol
        self.traces = Traces(self.address.name, self.address.epoch)
        self._transport = transport
        self._peers = peers
        self._superseded: set[NodeAddress] = set()  # that are being told so
        self._addressed: dict[str, NodeAddress] = {}  # the newest that something was sent to before it was heard of
        self._encoder = Encoder()
        self._encode_header = msgspec.msgpack.Encoder().encode

    def encode(self, message: Any) -> list[Frame]:
        """Frames of a body. Raises ``TypeError`` for what cannot travel."""
        return self._encoder.encode(message)

    def send(
        self,
        kind: Kind,
        to: NodeAddress,
        lane: Lane,
        *,
        body: Sequence[Frame] = (),
        type_: str = "",
        actor: str = "",
        id_: int = 0,
        budget_s: float = 0.0,
        sequence: int = 0,
        oldest: int = 0,
    ) -> None:
        """Raises ``PeerLost``, ``PeerRestarted`` or ``Overloaded``, and ``ValueError`` for what is too large."""
        if self._peers.alive.get(to.name) != to:
            self._address(to)
        header = Header(
            protocol=self._protocol,
            kind=kind,
            to=actor,
            sender=self.address,
            to_epoch=to.epoch,
            id=id_,
            type=type_,
            budget_s=budget_s,
            sequence=sequence,
            trace=self.traces.current() if actor else 0,
            oldest=oldest,
        )
        frames = [self._encode_header(header), *body]
        if len(frames) > 2:  # a header and a body alone are bounded already
            check_message(frames)
        self._transport.send(to, lane, frames)

    def _address(self, to: NodeAddress) -> None:
        """Before something goes to an incarnation that is not the newest that was heard of. Raises ``PeerLost`` or
        ``PeerRestarted``."""
        refusal = self._peers.refusal(to)
        if refusal is not None:
            raise refusal
        addressed = self._addressed.get(to.name)
        if to.epoch and (addressed is None or addressed.epoch < to.epoch):
            self._addressed[to.name] = to

    def tell_superseded(self, to: NodeAddress, id_: int, body: Sequence[Frame]) -> None:
        """Answer an incarnation that is out of use, over a connection that is closed once it has had the answer."""
        header = Header(
            protocol=self._protocol,
            kind=Kind.ERROR,
            to="",
            sender=self.address,
            to_epoch=to.epoch,
            id=id_,
            type="Failure",
        )
        try:
            self._transport.send(to, Lane.CONTROL, [self._encode_header(header), *body])
        except BusError:
            self.counters["unsent_error"] += 1
            return
        if to not in self._superseded:
            self._superseded.add(to)
            asyncio.get_running_loop().call_later(SUPERSEDED_S, self._part_from, to)

    def _part_from(self, superseded: NodeAddress) -> None:
        self._superseded.discard(superseded)
        self.leave(superseded)

    def expect(self) -> None:
        """What was just sent will be answered; see ``Transport.expect``."""
        self._transport.expect()

    def try_send(
        self,
        kind: Kind,
        to: NodeAddress,
        lane: Lane = Lane.CONTROL,
        *,
        body: Sequence[Frame] = (),
        type_: str = "",
        id_: int = 0,
        sequence: int = 0,
    ) -> bool:
        """Send or count as ``unsent_<kind>``: the deadline of who waits for it still holds."""
        try:
            self.send(kind, to, lane, body=body, type_=type_, id_=id_, sequence=sequence)
        except BusError:
            self.counters[f"unsent_{kind.name.lower()}"] += 1
            return False
        return True

    def stay_with(self, newest: NodeAddress) -> None:
        """Drop what waits for a node's earlier incarnations, also for those of which nothing was ever heard."""
        addressed = self._addressed.get(newest.name)
        later = [addressed] if addressed is not None and addressed.epoch > newest.epoch else []
        places = {endpoint for address in (newest, *later) for endpoint in (address.control, address.bulk)}
        self._transport.keep(newest.name, places)

    def leave(self, gone: NodeAddress) -> None:
        """Drop what waits for an incarnation that is gone; not what its successor is to get at the same place."""
        addressed, heard = self._addressed.get(gone.name), self._peers.newest(gone.name)
        later = [address for address in (addressed, heard) if address is not None and address.epoch > gone.epoch > 0]
        if not later:
            self._addressed.pop(gone.name, None)
        taken = {endpoint for address in later for endpoint in (address.control, address.bulk)}
        control, bulk = ("" if endpoint in taken else endpoint for endpoint in (gone.control, gone.bulk))
        self._transport.disconnect(NodeAddress(gone.name, control, bulk, gone.epoch))
