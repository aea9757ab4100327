"""What a person may ask about single trajectories, and order for them, for streams of tasks and for env hosts.

All of it goes to the coordinator actor. A question about a ticket that never was is answered with one that says so; an
order that cannot be carried out raises ``RemoteError`` with one line.
"""

from __future__ import annotations

import msgspec

from actors.env.messages import RunningTrajectory

# ---- questions ------------------------------------------------------------------------------------------------------


class GetTrajectory(msgspec.Struct, frozen=True):
    """The whole life of one ticket; answered with ``TrajectoryLife``."""

    ticket: str  # "t42"


class Moment(msgspec.Struct, frozen=True):
    """One thing that happened to a ticket."""

    what: str  # admitted, queued, sent, left its place, stored, taken, trained, lost, evicted, ended
    detail: str = ""  # for people: the queue, the host, the reason, the version
    ago_s: float | None = None  # None: longer ago than this sitting remembers; the journal has it without a time


class TrajectoryLife(msgspec.Struct, frozen=True):
    ticket: str
    state: str  # unknown, waiting, running, settling, stored, training, trained, lost, evicted, ended
    group: int | None
    task: int | None
    stream: str
    purpose: str  # train, evaluate, or "" where that is not known any more
    host: str  # the env host that has or had it, or ""
    moments: list[Moment]  # oldest first
    running: RunningTrajectory | None  # what its env host says of it now
    why: str  # one paragraph: why it is where it is, and what it waits for


class Explain(msgspec.Struct, frozen=True):
    """Why does it wait? Answered with ``Explained``."""

    ticket: str


class Explained(msgspec.Struct, frozen=True):
    text: str


class GetQueues(msgspec.Struct, frozen=True):
    """Ask for ``Queues``."""


class LevelState(msgspec.Struct, frozen=True):
    """One level of what waits to be started."""

    name: str  # evaluation, short, elastic
    waiting: int
    capacity: int | None  # None: no bound
    oldest_s: float
    flows: dict[str, int]  # stream of tasks -> how many wait


class StreamShare(msgspec.Struct, frozen=True):
    """One stream of tasks."""

    name: str
    share: float  # of the groups that are admitted from now on
    groups: int  # admitted so far


class HostState(msgspec.Struct, frozen=True):
    """One env host."""

    node: str
    places: int  # 0: it did not say
    used: int  # tickets in their places or about to be
    settling: int  # scored and stored
    draining: bool


class Queues(msgspec.Struct, frozen=True):
    levels: list[LevelState]
    streams: list[StreamShare]
    hosts: list[HostState]
    starts_per_s: float  # over the last minute or so


class Places(msgspec.Struct, frozen=True):
    """What a job uses of the places of its env hosts."""

    used: int
    wanted: int  # those, and as many as tickets wait
    bound: int | None  # what it may use at most; None: all that its hosts have


class GetPlaces(msgspec.Struct, frozen=True):
    """Ask for ``Places``."""


class SetPlaces(msgspec.Struct, frozen=True):
    """Use no more places than this from now on; what runs beyond goes on to its end. Answered with ``Places``."""

    bound: int


# ---- orders: answered with ``coordinator.messages.Changed`` ----------------------------------------------------------


class AbortTrajectory(msgspec.Struct, frozen=True):
    """End one that waits or runs, as lost: ``aborted_by_order``. Another one runs in its place."""

    ticket: str


class SetWeights(msgspec.Struct, frozen=True):
    """Other shares for streams of tasks, from now on; those that are not named keep their weight."""

    weights: dict[str, float]


class DrainHost(msgspec.Struct, frozen=True):
    """Start nothing new on a node's env host; what runs there goes on to its end."""

    node: str


class FillHost(msgspec.Struct, frozen=True):
    """Start trajectories there again."""

    node: str
