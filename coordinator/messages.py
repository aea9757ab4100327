"""What the coordinator is told by the roles of a run and asked by the admin shell."""

from __future__ import annotations

from typing import Literal

import msgspec

from actors.core.ref import Ref
from actors.env.messages import RunningTrajectory
from actors.proxy.messages import EngineState, ProxySet
from bus.message import NodeAddress

Role = Literal["coordinator", "proxy", "env", "reward", "trainer", "weightsync"]
ROLES: tuple[Role, ...] = ("proxy", "env", "reward", "trainer", "weightsync")
SEVERAL: frozenset[Role] = frozenset({"env", "proxy"})
"""Roles that several nodes of a run may have at once."""
"""The roles that a run needs beside its coordinator."""

MEMBER = "member"
"""The actor by which a node takes part: it is given orders, and told when the run is over."""


class Join(msgspec.Struct, frozen=True):
    """A node wants to take part; answered with ``Welcome`` once the run is prepared."""

    node: NodeAddress
    roles: list[Role]  # none: a spare, which takes what it is told to
    pid: int
    affinity: bytes  # the node's affinity map, as JSON
    software: str = ""  # its version; "" of a node from before it was said
    pulse: str = ""  # where it can be told that the process is gone; see coordinator.pulse
    standby: int | None = None  # process id of the standby coordinator beside it, 0 for none; None: it cannot have one

    @property
    def came_as_spare(self) -> bool:
        """Whatever roles it has been given since."""
        return self.standby is not None


class HardwareChanged(msgspec.Struct, frozen=True):
    """From a node whose hardware is not as it was, or to a leader that may not know it; answered with ``Noted``. See
    ``coordinator.vigil``."""

    node: NodeAddress
    affinity: bytes  # its map as it is now, as JSON
    begun: list[str]  # a line each for people: a GPU is lost, or slowed down; memory runs short; the map does not fit
    ended: list[str]


class Welcome(msgspec.Struct, frozen=True):
    """What a node needs to take its roles."""

    run: str
    job: bytes  # the resolved job, as JSON
    job_directory: str  # where import paths of user code are relative to
    run_directory: str
    resume: str  # checkpoint directory to start from, or ""
    version: int
    coordinator: Ref | None = None  # this very incarnation
    roles: list[Role] | None = None  # that it takes; None: all that it asked for
    keeps_store: bool = False  # whether the trajectory store goes on as it is, beside the checkpoint's weights


class RunOver(msgspec.Struct, frozen=True):
    """To every node that joined: the run has ended."""

    outcome: str


class LetGo(msgspec.Struct, frozen=True):
    """To a node that is to be replaced: end, though the run goes on. Answered with ``Ending``."""

    why: str


class Ending(msgspec.Struct, frozen=True):
    """It will."""


class Moved(msgspec.Struct, frozen=True):
    """To every node of a run: another actor has a role from now on. Answered with ``Known``."""

    role: Role
    ref: Ref  # of several proxies: one, for who knows of no others
    proxies: ProxySet | None = None  # all of them, where it is about them


class Known(msgspec.Struct, frozen=True):
    """The node's actors talk to that one."""


class Follow(msgspec.Struct, frozen=True):
    """From a new leader, to every node of the run; answered with ``Following``. Whoever has heard it refuses what an
    older leader says. ``begun``: it takes reports from now on; until then they are kept back."""

    leader: Ref
    begun: bool = False


class GetHostReading(msgspec.Struct, frozen=True):
    """To any node of a host; answered with ``hwprobe.host_usage.HostReading``."""


class Announce(msgspec.Struct, frozen=True):
    """A role's actor is there. ``places``: how many trajectories an env host runs at once (0: it does not say)."""

    role: Role
    ref: Ref
    places: int = 0
    serving: dict[str, int] = {}  # of a proxy, which says so again whenever it changes; see ``ServingProxy``


class Following(msgspec.Struct, frozen=True):
    """What the node had told the leaders before: that it takes part, and which roles are up."""

    join: Join
    announced: list[Announce]


class Announced(msgspec.Struct, frozen=True):
    """The coordinator knows it."""


class BeginAgain(msgspec.Struct, frozen=True):
    """From a leader, to every node that follows: the run goes back to a checkpoint. End what there is, and join again
    at ``leader`` with these roles."""

    leader: Ref
    roles: list[Role]


class Take(msgspec.Struct, frozen=True):
    """To a spare: have these roles from now on."""

    roles: list[Role]


class StandBy(msgspec.Struct, frozen=True):
    """To a spare: have a standby coordinator beside you, for the run of this directory."""

    run_directory: str


class StandbyGone(msgspec.Struct, frozen=True):
    """From a spare: the standby coordinator beside it has ended and is not started again. Answered with ``Noted``."""

    node: NodeAddress
    reason: str


class Obeyed(msgspec.Struct, frozen=True):
    """An order to a node has arrived."""


class Find(msgspec.Struct, frozen=True):
    """Answered with ``Found`` once somebody has announced the role."""

    role: Role
    timeout_s: float


class Found(msgspec.Struct, frozen=True):
    ref: Ref
    proxies: ProxySet | None = None  # all of them, where it was asked for one


class RoleFailed(msgspec.Struct, frozen=True):
    """A role cannot go on: the run begins again from a checkpoint where it can, else it ends with this error."""

    role: Role
    node: str
    reason: str


# ---- the admin shell ------------------------------------------------------------------------------------------------


class GetStatus(msgspec.Struct, frozen=True):
    """Ask for ``Status``."""


class Status(msgspec.Struct, frozen=True):
    run: str
    state: str  # "starting", "running", "paused", "stopping"
    step: int
    steps: int
    version: int
    alpha: int
    balance: str
    in_flight: int
    buffered: int
    groups_complete: int
    groups_needed: int
    reward: float | None
    success: float | None
    evaluation: float | None
    engines: list[EngineState]
    elapsed_s: float
    steadiness: str = ""  # what the monitor of alpha said last


class GetPools(msgspec.Struct, frozen=True):
    """Ask for ``Pools``."""


class PoolFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All devices of one hardware class, over all hosts."""

    hardware_class: str
    kind: str  # "compute", "bandwidth" or ""
    devices: int
    declared: int | None  # how many the job's profile says there are
    hosts: list[str]


class Pools(msgspec.Struct, frozen=True):
    pools: list[PoolFacts]
    warnings: list[str]


class GetHosts(msgspec.Struct, frozen=True):
    """Ask for ``HostList``."""


class HostFacts(msgspec.Struct, frozen=True):
    """One host, by the address at which its nodes listen."""

    host: str
    state: Literal["in use", "spare", "quarantined"]
    nodes: list[str]
    roles: list[Role]
    standby: bool  # whether a standby coordinator is there
    failures: int  # that count towards a quarantine
    barred_s: float  # for how much longer it is left out
    no_standby: str = ""  # why there is none, where there was to be one


class HostList(msgspec.Struct, frozen=True):
    hosts: list[HostFacts]


class ReleaseHost(msgspec.Struct, frozen=True):
    """Let a host in quarantine be given roles again."""

    host: str


class GetTrajectories(msgspec.Struct, frozen=True):
    """Ask for ``Trajectories``."""


class Trajectories(msgspec.Struct, frozen=True):
    running: list[RunningTrajectory]


class Pause(msgspec.Struct, frozen=True):
    """Admit nothing and train nothing until ``Unpause``; what runs goes on to its end."""


class Unpause(msgspec.Struct, frozen=True):
    """Go on."""


class SetAlpha(msgspec.Struct, frozen=True):
    """Another staleness bound, from now on."""

    alpha: int


class Changed(msgspec.Struct, frozen=True):
    """What an order led to, for the person who gave it."""

    message: str
