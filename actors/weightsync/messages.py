"""What moves the weights: from the trainer's rank 0 to every engine, block by block, and the order to do so."""

from __future__ import annotations

import msgspec
import numpy as np

from actors.core.ref import Ref
from actors.core.typed import Message
from actors.weightsync.manifest import Manifest

PUBLISH_TIMEOUT_S = 600.0
"""How long a publication may take, from the order until every engine has the version or has said why not."""


class Fetch(msgspec.Struct, frozen=True):
    """Ask a publisher for all blocks of a version, as a stream of ``Blocks``."""

    version: int


class Block(msgspec.Struct, frozen=True):
    """One piece of one tensor."""

    name: str
    offset: int  # bytes
    data: np.ndarray  # uint8


class Blocks(msgspec.Struct, frozen=True):
    """Blocks that travel together: a message for each of many small tensors would cost more than their bytes."""

    blocks: list[Block]


class Publish(msgspec.Struct, frozen=True):
    """Bring every engine to a version; answered with ``Published``."""

    manifest: Manifest
    source: Ref


class Published(msgspec.Struct, frozen=True):
    """Which engines hold the version, and which do not and why. In neither: those that died or get a newer one."""

    version: int
    engines: list[str]
    refused: dict[str, str]
    seconds: float
    swap_seconds: float  # the longest time for which an engine did not serve
    bytes: int


class EngineJoined(msgspec.Struct, frozen=True):
    """A new engine (or one that came back) needs the current version before it may serve."""

    engine: str
    host: Ref
    proxy: Ref | None = None  # whose it is, and by way of which it is ordered; None of an older one: the run's only one


class EngineLeft(msgspec.Struct, frozen=True):
    engine: str
    reason: str


class ProvenVersion(msgspec.Struct, frozen=True):
    """The last receipt of an engine that was accepted."""

    engine: str
    version: int
    tensors: int  # whose digests were as published
    bytes: int
    canary_nats: float  # by how much its canary was off, at most
    swap_s: float  # for how long the engine did not serve
    age_s: float


class Refusal(msgspec.Struct, frozen=True):
    """An engine that did not get a version, and why."""

    engine: str
    version: int
    reason: str


class WeightsState(msgspec.Struct, frozen=True):
    ordered: int | None  # the version that all engines are brought to; None before the first
    proven: list[ProvenVersion]  # of the engines that are there
    refusals: list[Refusal]  # the newest


class DescribeWeights(Message[WeightsState], frozen=True):
    """To the weight-sync actor: which engine has proven what."""
