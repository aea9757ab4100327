"""Who the other nodes are: their newest incarnations, when they were last heard, and which are lost.

Invariant: incarnations of a name only ever grow. What comes from an earlier one is refused, what goes to an earlier
or a lost one is refused with the reason.
"""

from __future__ import annotations

import enum
from collections import OrderedDict

from bus.message import BusError, NodeAddress, PeerLost, PeerRestarted

REMEMBERED_LOSSES = 1024
"""Lost incarnations of which the reason is kept."""


class Meeting(enum.Enum):
    """What a message's sender turned out to be."""

    KNOWN = enum.auto()
    NEW = enum.auto()  # first message of this incarnation
    STALE = enum.auto()  # of an incarnation that has a successor or is lost
    FALSE = enum.auto()  # not an address, or another node's name


class Peers:
    """See the module docstring. Pure bookkeeping."""

    def __init__(self) -> None:
        self.alive: dict[str, NodeAddress] = {}  # by name, the newest incarnations; to be read only
        self._ids: dict[bytes, NodeAddress] = {}  # the same, by the routing ids that they have
        self._heard: dict[str, float] = {}
        self._lost: OrderedDict[str, tuple[int, str]] = OrderedDict()  # name -> epoch, why

    def __len__(self) -> int:
        """How many are known and not lost."""
        return len(self.alive)

    def hear(self, routing_id: bytes, sender: NodeAddress, now: float) -> bool:
        """Note a message of an incarnation that is known, and under this routing id; False for any other. On the way of
        every message, so written to be cheap."""
        if self._ids.get(routing_id) != sender:
            return False
        self._heard[sender.name] = now
        return True

    def meet(self, sender: NodeAddress, now: float) -> Meeting:
        """What to make of a message's sender; a known one is noted as heard."""
        known = self.alive.get(sender.name)
        if known == sender:
            self._heard[sender.name] = now
            return Meeting.KNOWN
        if not _well_formed(sender) or (known is not None and sender.epoch == known.epoch):
            return Meeting.FALSE
        newest = known.epoch if known is not None else self._lost.get(sender.name, (0, ""))[0]
        if sender.epoch <= newest:
            return Meeting.STALE
        return Meeting.NEW

    def admit(self, sender: NodeAddress, now: float) -> NodeAddress | None:
        """Take a new incarnation as the newest; returns the one that it succeeds, if any was known."""
        earlier = self.alive.get(sender.name)
        if earlier is not None:
            self._ids.pop(routing_id_of(earlier), None)
        self.alive[sender.name] = sender
        self._ids[routing_id_of(sender)] = sender
        self._heard[sender.name] = now
        self._lost.pop(sender.name, None)
        return earlier

    def all(self) -> list[NodeAddress]:
        """Everyone who was heard and is not lost."""
        return list(self.alive.values())

    def newest(self, name: str) -> NodeAddress | None:
        """The newest incarnation that was heard of and is not lost."""
        return self.alive.get(name)

    def last_heard(self, name: str) -> float | None:
        """Loop time of the newest message from a node."""
        return self._heard.get(name)

    def refusal(self, to: NodeAddress) -> BusError | None:
        """Why nothing can be sent to this incarnation, if so. Epoch 0 means whichever answers: always worth a try."""
        if to.epoch == 0:
            return None
        known = self.alive.get(to.name)
        if known is not None:
            if to.epoch == known.epoch:  # nor lost: one that is, is not known
                return None
            if to.epoch < known.epoch:
                return PeerRestarted(f"node {to.name} restarted since it was addressed")
        epoch, why = self._lost.get(to.name, (0, ""))
        return PeerLost(f"node {to.name} is lost: {why}") if to.epoch <= epoch else None

    def lose(self, address: NodeAddress, why: str) -> NodeAddress | None:
        """Declare an incarnation dead (epoch 0: the one that is known). Returns the address that is out of use, or
        None where a newer incarnation lives."""
        known = self.alive.get(address.name)
        if known is not None and known.epoch > address.epoch > 0:
            return None
        gone = known if known is not None and address.epoch in (0, known.epoch) else address
        if known is not None:
            self._ids.pop(routing_id_of(known), None)
        self.alive.pop(address.name, None)
        self._heard.pop(address.name, None)
        if gone.epoch:
            self._lost[gone.name] = (gone.epoch, why)
            self._lost.move_to_end(gone.name)
            if len(self._lost) > REMEMBERED_LOSSES:
                self._lost.popitem(last=False)
        return gone


def routing_id_of(sender: NodeAddress) -> bytes:
    """Under which an incarnation connects."""
    return f"{sender.name}/{sender.epoch}".encode()


def _well_formed(address: NodeAddress) -> bool:
    return (
        bool(address.name)
        and address.epoch > 0
        and all(endpoint.startswith("tcp://") for endpoint in (address.control, address.bulk))
    )
