"""What the proxy and its engine hosts are told, and what they answer.

A command gets two answers on one stream: ``Accepted`` at once, and ``Done`` when it has taken effect.
"""

from __future__ import annotations

import msgspec
import numpy as np

from actors.core.ref import Ref
from actors.core.typed import Message
from actors.proxy.engines.load import EngineLoad
from actors.proxy.engines.progress import Effort
from actors.proxy.engines.protocol import Begun, Completion, EngineLimits, GenerateRequest
from actors.weightsync.manifest import Manifest, Receipt
from hwprobe.costmodel import CostState
from hwprobe.fitting import Work

# ---- to the proxy ---------------------------------------------------------------------------------------------------


class Add(msgspec.Struct, frozen=True):
    """Generate one turn. The engine's host answers straight to ``reply_to`` with ``Finished``."""

    request: GenerateRequest
    reply_to: Ref
    domain: str = "default"  # its task: key of the declared affinity, and of the mapping
    turn: int | None = None  # which of its trajectory's, from 0; None: who asks does not say
    keeps: bool = False  # whether ``reply_to`` hears of its tokens (``KeptSoFar``) while it goes on


class Abort(msgspec.Struct, frozen=True):
    """End a request; its tokens so far arrive at ``reply_to`` as usual."""

    request_id: str


class TrajectoryEnded(msgspec.Struct, frozen=True):
    """Nothing more will be asked for this trajectory: its KV cache may go."""

    trajectory: str
    whole: bool = True  # it was played to its end: its length says something of its task
    moved: bool = False  # it goes on at another proxy, which answers what was asked for it here


class Suspend(msgspec.Struct, frozen=True):
    """Start no more steps on an engine (None: on all); requests keep their tokens and new ones queue."""

    engine: str | None = None


class Update(msgspec.Struct, frozen=True):
    """Swap a suspended engine to the version that is staged there; ``Done`` carries the receipt."""

    engine: str
    version: int


class Resume(msgspec.Struct, frozen=True):
    """Serve again, from now on ``version``; KV caches are rebuilt under it."""

    engine: str | None = None
    version: int | None = None


class Remove(msgspec.Struct, frozen=True):
    """Take an engine out of routing for good; its requests move to others."""

    engine: str
    reason: str


class EngineReady(msgspec.Struct, frozen=True):
    """An engine's host is up, without trustworthy weights yet."""

    engine: str
    host: Ref
    limits: EngineLimits
    start_seconds: float


class Served(msgspec.Struct, frozen=True):
    """These requests were answered; what the engine did since its last report."""

    engine: str
    request_ids: list[str]
    tokens: int
    load: EngineLoad | None = None  # once in ``rollout.load_every_s``
    sampled: list[int] = []  # tokens of each answer, what a request had brought included; 0: cut or refused
    work: Work | None = None  # with ``load``: what was computed since
    effort: Effort = Effort()  # with ``load``: whether it gets anywhere


class SampledSoFar(msgspec.Struct, frozen=True):
    """What R requests that go on have sampled since the engine's last report, one behind another (N tokens), to be kept
    for the case that it dies (``actors.proxy.kept``). Answered with ``Acknowledged``."""

    engine: str
    request_ids: list[str]
    since: np.ndarray  # int32 [R]; how many tokens each had before
    counts: np.ndarray  # int32 [R]; how many are here
    tokens: np.ndarray  # int32 [N]
    logprobs: np.ndarray  # float32 [N]
    versions: np.ndarray  # int32 [N]


class Prefer(msgspec.Struct, frozen=True):
    """From now on a domain's requests go to this hardware class first; those in flight stay where they are."""

    domain: str
    hardware_class: str


ADVICE = "advice"
"""Domain of requests that are no trajectory's: nothing is learned from them."""


class MappingOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Who ordered which mapping of tasks to hardware classes, and why."""

    number: int
    by: str  # learned, advised
    why: str
    before: dict[str, dict[str, float]]
    after: dict[str, dict[str, float]]
    at_s: float  # by the proxy's clock


class Assigned(msgspec.Struct, frozen=True):
    """The shares that hold now, and the number of the order."""

    number: int
    shares: dict[str, dict[str, float]]
    refused: str = ""


class Assign(Message[Assigned], frozen=True):
    """From now on new trajectories are divided so: domain -> hardware class -> share. Domains that are not named go
    where it is declared."""

    shares: dict[str, dict[str, float]]
    by: str
    why: str = ""


class UndoMapping(Message[Assigned], frozen=True):
    """Take the last ``Assign`` back; for a while only people change the mapping then."""


class CostsState(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, what is ordered."""

    state: CostState
    shares: dict[str, dict[str, float]]
    orders: list[MappingOrder]  # that can be taken back, oldest first
    in_flight: int  # trajectories that have asked for something and have not ended
    held_s: float  # for so long nothing but a person changes the mapping
    now_s: float  # by the proxy's clock
    number: int = 0  # of the last order there was, taken back or not
    preferred: dict[str, str] = {}  # task or "default" -> class: as declared, or moved since (``Prefer``)


class DescribeCosts(Message[CostsState], frozen=True):
    """Ask for the cost model and the mapping."""


class Inherited(msgspec.Struct, frozen=True):
    """Whether it was taken over."""

    taken: bool


class InheritCosts(Message[Inherited], frozen=True):
    """What the proxy before knew and was ordered, for its successor, which takes it once, and only as long as it has
    had no order of its own."""

    costs: CostsState
    age_s: float  # since they were described


class Rebalanced(msgspec.Struct, frozen=True):
    """How many trajectories each engine has let go; engines that let none go are left out."""

    released: dict[str, int]


class Rebalance(Message[Rebalanced], frozen=True):
    """Let engines that hold more than their share of the trajectories let some go: their next turns are routed by load
    alone. Only those that ask for nothing just now; their prefixes are computed anew where they go."""


class Moving(msgspec.Struct, frozen=True):
    """What came of ``MoveTrajectories``: how many go, by what they were at."""

    idle: int = 0  # they asked for nothing: their next turn is played there
    unsent: int = 0  # a request was on its way to the engine
    asked: int = 0  # a request is with the engine, which has been told to let it go
    refused: str = ""  # why none goes


class MoveTrajectories(Message[Moving], frozen=True):
    """Let another engine go on with some of an engine's trajectories: what waits there first, then the shortest. What
    was sampled of a request goes along."""

    source: str
    target: str
    trajectories: int  # at most
    why: str


class DescribeProxy(msgspec.Struct, frozen=True):
    """Ask for ``ProxyState``."""


# ---- which proxies there are ----------------------------------------------------------------------------------------


class ServingProxy(msgspec.Struct, frozen=True):
    """A proxy of a run, and what it can take."""

    ref: Ref
    places: dict[str, int] = {}  # hardware class -> places in the batches of its engines that serve

    @property
    def serves(self) -> bool:
        return any(self.places.values())


class ProxySet(msgspec.Struct, frozen=True):
    """All proxies of a run. ``order``: the leader's epoch, and a number; what is smaller is older."""

    members: list[ServingProxy] = []
    order: tuple[int, int] = (0, 0)


# ---- answers --------------------------------------------------------------------------------------------------------


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The command is taken; ``engine`` is where an ADD went ("" while none serves)."""

    engine: str = ""


class Done(msgspec.Struct, frozen=True, tag=True):
    """The command has taken effect."""

    version: int | None = None
    receipt: Receipt | None = None


Progress = Accepted | Done


class Acknowledged(msgspec.Struct, frozen=True):
    """Nothing to say but that it was taken."""


class EngineState(msgspec.Struct, frozen=True):
    """One engine as the proxy sees it."""

    name: str
    state: str
    hardware_class: str
    version: int | None
    in_flight: int
    restarts: int
    places: int = 1  # of its running batch
    by_domain: dict[str, int] = {}  # requests in flight
    trajectories: int = 0  # that have their prefix there
    load: EngineLoad | None = None  # as it said last
    load_age_s: float = 0.0
    gave_s: float | None = None  # ago, that trajectories were ordered away from it; None: never
    took_s: float | None = None  # likewise, to it
    proxy: str = ""  # the node of its proxy, where the engines of all are looked at


class ProxyState(msgspec.Struct, frozen=True):
    """Everything that a person or a metric wants to know of the proxy."""

    engines: list[EngineState]
    queued: int
    tokens: int
    counters: dict[str, int]


# ---- to whoever asked for a generation ------------------------------------------------------------------------------


class Finished(msgspec.Struct, frozen=True):
    """Completions of one engine step, packed."""

    engine: str
    completions: list[Completion]


class KeptSoFar(msgspec.Struct, frozen=True):
    """What requests that go on have sampled since their proxy last said so: whoever asked goes on behind it elsewhere,
    should that proxy be lost. Not answered."""

    proxy: Ref
    report: SampledSoFar


class RequestFailed(msgspec.Struct, frozen=True):
    """A request that no engine will answer, and why."""

    request_id: str
    reason: str


# ---- to an engine's host --------------------------------------------------------------------------------------------


class HostAdd(msgspec.Struct, frozen=True):
    """Requests of one scheduling tick, with where to answer each, and the trajectories that have ended since."""

    requests: list[GenerateRequest]
    reply_to: list[Ref]
    ended: list[str] = []
    prefill_at: list[Ref | None] = []  # the host whose engine computes a request's prompt first; empty: none does


class HostPrefill(Message[Acknowledged], frozen=True):
    """Compute a prompt for an engine that shares its keys and values; answered once that is done."""

    request: GenerateRequest  # one token, which nobody looks at


class HostAbort(msgspec.Struct, frozen=True):
    request_id: str


class HostRelease(msgspec.Struct, frozen=True):
    """Let requests go, between two steps, without answering whoever asked; answered with ``Released``."""

    request_ids: list[str]


class Unfinished(msgspec.Struct, frozen=True):
    """A request that its engine has let go, and what it had sampled."""

    request_id: str
    begun: Begun | None


class Released(msgspec.Struct, frozen=True):
    """Those that are missing had been answered before."""

    requests: list[Unfinished]


class HostForget(msgspec.Struct, frozen=True):
    """Trajectories that have ended, where no requests were sent that could have brought the news."""

    trajectories: list[str]


class Stage(msgspec.Struct, frozen=True):
    """Fetch a version from its publisher into memory while the engine goes on generating."""

    manifest: Manifest
    source: Ref


class Staged(msgspec.Struct, frozen=True):
    version: int
    bytes: int
    seconds: float


class HostSuspend(msgspec.Struct, frozen=True):
    """Answered once no step is running."""


class HostUpdate(msgspec.Struct, frozen=True):
    """Load the staged version into the suspended engine; answered with its ``Receipt``."""

    version: int


class HostResume(msgspec.Struct, frozen=True):
    pass


class HostScore(msgspec.Struct, frozen=True):
    """Log-probabilities of a sequence under the weights in use."""

    tokens: np.ndarray  # int32 [T]


class Scored(msgspec.Struct, frozen=True):
    logprobs: np.ndarray  # float32 [T-1]
