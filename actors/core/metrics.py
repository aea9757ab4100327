"""What an actor has done, in numbers that cost next to nothing to keep, and how a node describes itself.

Invariant: every message that an actor took is counted once, by the lane it came on, and once in the histogram of how
long its handler took; the bounds of the histogram are the same everywhere, so that histograms can be added.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from actors.core.dead_letters import DeadLetter
from actors.core.typed import Message
from bus.message import Lane, NodeAddress

if TYPE_CHECKING:
    from actors.core.actor import HandlerFacts

log = logging.getLogger(__name__)

BOUNDS_S = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
"""Upper bounds of the histogram's buckets; a last one is for all that took longer."""

LOCAL = len(Lane)
LANES = (*(lane.name.lower() for lane in Lane), "local")

SLOW_S = 1.0
"""A handler that is not concurrent and takes longer holds up its actor: that is a warning."""

WARN_EVERY_S = 60.0


class ActorDescription(msgspec.Struct, frozen=True):
    """One actor, as it is now; its counts are over its life, restarts included."""

    kind: str
    queued: int
    handled: int
    lanes: dict[str, int]  # of these, by the lane they came on; "local" from its own node
    latency: list[int]  # handlers by how long they took, see BOUNDS_S
    failures: int
    cancelled: int  # asks given up by their askers, before or while they were handled
    dead_letters: int
    handling: str  # the handler that holds the actor's turn, "" for none
    handling_s: float
    took_s: float = 0.0  # all handlers together; what ``latency`` counts, summed


class ProcessFacts(msgspec.Struct, frozen=True):
    """The process that a node runs in."""

    pid: int
    cpu_s: float
    resident_bytes: int  # 0 where the system does not say


def process_facts() -> ProcessFacts:
    """Of this process."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        pages = 0
    return ProcessFacts(os.getpid(), time.process_time(), pages * os.sysconf("SC_PAGE_SIZE"))


class Description(msgspec.Struct, frozen=True):
    """One node, as it is now."""

    node: str
    address: NodeAddress
    counters: dict[str, int]  # of the node and its connections: "resent", "deadlines", "dead_letters", ...
    unfinished: dict[str, int]  # asks and streams that wait, answers kept because they may be asked for again
    watches: int
    actors: dict[str, ActorDescription]
    dead_letters: list[DeadLetter]  # newest first
    objects: dict[str, int] = {}  # those it has put, and what they take; "borrowed", "mapped": of other nodes
    watched: list[NodeAddress] = []  # nodes whose silence it would notice: a parent's children are among them
    process: ProcessFacts | None = None  # None on a simulated network, where nodes are none of their own
    software: str = ""  # its version; "" of a node from before it was said


class DescribeNode(Message[Description], frozen=True):
    """To a node's actor."""


class Metrics:
    """One actor's."""

    __slots__ = ("_warned", "cancelled", "dead_letters", "failures", "handling", "lanes", "latency", "since", "took_s")

    def __init__(self) -> None:
        self.lanes = [0] * len(LANES)
        self.latency = [0] * (len(BOUNDS_S) + 1)
        self.took_s = 0.0
        self.failures = 0
        self.cancelled = 0
        self.dead_letters = 0
        self.handling: HandlerFacts | None = None  # in the actor's turn
        self.since = 0.0
        self._warned: dict[str, float] = {}

    def warn(self, who: str, method: str, seconds: float, now: float, waiting: int) -> None:
        """Once a handler and minute."""
        if now - self._warned.get(method, now - WARN_EVERY_S) >= WARN_EVERY_S:
            self._warned[method] = now
            log.warning("%s: %s takes long, %.1f s by now; %d messages wait behind it", who, method, seconds, waiting)
