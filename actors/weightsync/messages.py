"""What moves the weights: from the trainer's rank 0 to every engine, block by block, and the order to do so."""

from __future__ import annotations

import msgspec
import numpy as np

from actors.core.ref import Ref
from actors.weightsync.manifest import Manifest


class Fetch(msgspec.Struct, frozen=True):
    """Ask a publisher for all blocks of a version, as a stream."""

    version: int


class Block(msgspec.Struct, frozen=True):
    """One piece of one tensor."""

    name: str
    offset: int  # bytes
    data: np.ndarray  # uint8


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


class EngineLeft(msgspec.Struct, frozen=True):
    engine: str
    reason: str
