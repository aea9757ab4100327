"""What answers at the other host while the doctor looks at the way between two (``bin/doctor --serve``).

Invariant: it keeps nothing of what it is sent and tells nothing but the time, versions and its address; whoever asks
has the cluster's key, where there is one.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np

from actors.core import Actor, Message, handler
from actors.version import VERSION
from bus.message import NodeAddress
from hwprobe.doctor.packages import versions

NODE, NURSE = "doctor", "nurse"


class Pulse(msgspec.Struct, frozen=True):
    """Its host, at this moment."""

    at: float  # time of day, in seconds
    node: NodeAddress
    versions: dict[str, str]


class TakePulse(Message[Pulse], frozen=True):
    """Answered at once."""


class Weighed(msgspec.Struct, frozen=True):
    size: int  # bytes


class Weigh(Message[Weighed], frozen=True):
    load: np.ndarray  # uint8


class Nurse(Actor):
    """See the module docstring."""

    def __init__(self) -> None:
        self._versions = {"rollart": VERSION, **versions()}

    @handler
    async def take_pulse(self, message: TakePulse) -> Pulse:
        return Pulse(time.time(), self.node.address, self._versions)

    @handler
    async def weigh(self, message: Weigh) -> Weighed:
        return Weighed(message.load.nbytes)
