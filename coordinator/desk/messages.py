"""What the desk is asked by the admin shell, and what it answers; every answer is also what ``--json`` prints."""

from __future__ import annotations

import msgspec

from actors.core.metrics import Description
from actors.core.typed import Message
from actors.env.messages import Followed
from actors.proxy.messages import CostsState, EngineState
from actors.weightsync.messages import WeightsState
from coordinator.desk.audit import AuditLine
from coordinator.metadata.measured import Shard
from coordinator.orders import Queues
from coordinator.resources.resolve import Place
from hwprobe import AffinityMap

DESK = "desk"
"""The desk's name on the coordinator's node."""

# ---- looking --------------------------------------------------------------------------------------------------------


class SeenNode(msgspec.Struct, frozen=True):
    """One process of the run. Without a ``description`` it did not answer, and ``silence`` says how."""

    name: str
    parent: str  # the node that started it; "" for one that joined by itself
    roles: list[str]
    pid: int  # 0 where nobody said
    control: str
    hardware: str
    description: Description | None
    silence: str = ""


class Survey(msgspec.Struct, frozen=True):
    nodes: list[SeenNode]


class GetSurvey(Message[Survey], frozen=True):
    """Ask every process of the run to describe itself."""


class Engines(msgspec.Struct, frozen=True):
    engines: list[EngineState]
    queued: int  # requests that no engine could take yet
    tokens: int  # sampled in this sitting
    counters: dict[str, int]


class GetEngines(Message[Engines], frozen=True):
    """Ask the proxy."""


class Backlog(msgspec.Struct, frozen=True):
    """Where work waits, from admission to the batch."""

    admission: str  # "open" or "closed"
    capacity: int  # groups that may be in flight, buffered or taken
    groups: int  # of these, in flight or buffered
    groups_complete: int
    groups_needed: int  # for the next batch
    in_flight: int  # trajectories
    buffered: int
    waiting: dict[str, int]  # running trajectories by what they wait for
    proxy: int  # requests that no engine could take yet
    engines: dict[str, int]  # requests by engine
    mailboxes: dict[str, int]  # messages that wait, by actor; empty ones are left out
    tickets: Queues  # trajectories that wait to be started, streams of tasks, env hosts


class GetBacklog(Message[Backlog], frozen=True):
    """Ask the scheduler, the proxy, the env hosts and every mailbox."""


class Versions(msgspec.Struct, frozen=True):
    learner: int
    alpha: int
    weights: WeightsState


class GetVersions(Message[Versions], frozen=True):
    """Ask for the learner's version and what every engine has proven to serve."""


class Shards(msgspec.Struct, frozen=True):
    store: str  # as the job names it
    shards: list[Shard]


class GetShards(Message[Shards], frozen=True):
    """Ask how fast the metadata store is."""


class NodeHardware(msgspec.Struct, frozen=True):
    node: str
    affinity: AffinityMap


class Hardware(msgspec.Struct, frozen=True):
    nodes: list[NodeHardware]
    places: list[Place]  # which process runs on which device, as the coordinator planned it
    costs: CostsState | None = None  # what the proxy has measured, and which class plays what; None: it does not say


class GetHardware(Message[Hardware], frozen=True):
    """Ask for every node's affinity map and the placement."""


class MetricsText(msgspec.Struct, frozen=True):
    text: str


class GetMetrics(Message[MetricsText], frozen=True):
    """Ask for all counters and gauges, as Prometheus would get them."""


class Audit(msgspec.Struct, frozen=True):
    lines: list[AuditLine]  # oldest first


class GetAudit(Message[Audit], frozen=True):
    """Ask who ordered what: the last lines of the audit log."""

    count: int


class FilePiece(msgspec.Struct, frozen=True):
    """A part of one of the run directory's files, in order."""

    name: str  # in the bundle
    data: bytes
    last: bool  # of this file
    note: str  # what is not in the file, and why


class FetchFiles(Message[FilePiece], frozen=True):
    """A stream of what a support bundle takes from the run directory, without its secrets."""


class Follow(Message[Followed], frozen=True):
    """A stream of what a running trajectory does, to its end. Without a ticket: of the one that began last, or
    begins next."""

    ticket: str = ""
