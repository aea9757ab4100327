"""What the trainer actor and its ranks are told, and what they answer."""

from __future__ import annotations

import msgspec
import numpy as np

from actors.core.ref import Ref
from actors.env.messages import Outcome
from actors.trainer.backends.protocol import Inspection, TrainBatch
from actors.trajectory import Trajectory
from actors.weightsync.manifest import Manifest

# ---- to the trainer actor -------------------------------------------------------------------------------------------


class Store(msgspec.Struct, frozen=True):
    """Keep a scored trajectory until it is trained on or discarded."""

    trajectory: Trajectory
    metrics: dict[str, float] = {}  # the environment's own, for whoever must rebuild what is known of it


class Stored(msgspec.Struct, frozen=True):
    """It is on disk: the death of any process loses it no more."""


class Discard(msgspec.Struct, frozen=True):
    """These will not be trained on; answered with ``Discarded``."""

    tickets: list[str]


class Discarded(msgspec.Struct, frozen=True):
    """They are gone."""


class Train(msgspec.Struct, frozen=True):
    """One optimiser step on whole groups: from ``version`` to ``version + 1``."""

    version: int
    groups: list[list[str]]  # tickets


class Weights(msgspec.Struct, frozen=True):
    """A version that can be fetched."""

    manifest: Manifest
    source: Ref


class Trained(msgspec.Struct, frozen=True):
    weights: Weights
    statistics: dict[str, float]


class DescribeTrainer(msgspec.Struct, frozen=True):
    """Ask for ``TrainerState``: what a new leader must know to go on."""


class LastStep(msgspec.Struct, frozen=True):
    """The newest step that is done, and what it was done on."""

    order: Train
    trained: Trained
    kept: list[Outcome]


class TrainerState(msgspec.Struct, frozen=True):
    """``weights``: the newest, once there are any; ``stepping``: the order that is being carried out;
    ``kept``: what is stored; ``lives``: whether no rank has died."""

    weights: Weights | None
    stepping: Train | None
    last: LastStep | None
    kept: list[Outcome]
    lives: bool = True


class Imitate(msgspec.Struct, frozen=True):
    """One optimiser step that makes what was sampled in these trajectories more likely: from ``version`` to
    ``version + 1``, which nobody is told about."""

    version: int
    trajectories: list[Trajectory]
    learning_rate: float


class Imitated(msgspec.Struct, frozen=True):
    statistics: dict[str, float]


class ScoreTrajectories(msgspec.Struct, frozen=True):
    """How likely is what was sampled in these trajectories?"""

    trajectories: list[Trajectory]


class LogProbabilities(msgspec.Struct, frozen=True):
    """Of each sampled token; one array for each segment, in order: float32 [T], 0 where nothing was sampled."""

    segments: list[np.ndarray]


class InspectGroups(msgspec.Struct, frozen=True):
    """What would a step on these groups do? ``imitate``: one of imitation, which knows no groups."""

    groups: list[list[Trajectory]]
    imitate: bool = False


class InspectedGroups(msgspec.Struct, frozen=True):
    """``batch`` is what the groups were made into."""

    batch: TrainBatch
    inspection: Inspection


class WriteModel(msgspec.Struct, frozen=True):
    """Write the weights as ``model.safetensors`` into an existing directory."""

    directory: str


class GetWeights(msgspec.Struct, frozen=True):
    """Answered once all ranks are up: the version they start from."""


class SaveCheckpoint(msgspec.Struct, frozen=True):
    """Write the ranks' state and the stored trajectories below an existing directory."""

    directory: str


class Saved(msgspec.Struct, frozen=True):
    seconds: float


class RankReady(msgspec.Struct, frozen=True):
    """From a rank: it holds the policy. Rank 0 adds the weights that it starts from."""

    rank: int
    ref: Ref
    weights: Weights | None


class Welcomed(msgspec.Struct, frozen=True):
    """The trainer actor knows the rank now."""


# ---- to a rank ------------------------------------------------------------------------------------------------------


class RunStep(msgspec.Struct, frozen=True):
    """Forward, backward, optimiser step; then publish what came out as ``version``."""

    version: int
    batch: TrainBatch
    learning_rate: float
    publish: bool = True  # whether anybody will want the new weights
    clip: float | None = None  # the greatest norm of the gradient; default: train.max_grad_norm


class StepResult(msgspec.Struct, frozen=True):
    statistics: dict[str, float]
    weights: Weights | None  # from rank 0


class ScoreBatch(msgspec.Struct, frozen=True):
    """Answered with ``LogProbabilities``."""

    batch: TrainBatch


class InspectBatch(msgspec.Struct, frozen=True):
    """Answered with ``Inspection``."""

    batch: TrainBatch


class SaveRank(msgspec.Struct, frozen=True):
    directory: str


class RankSaved(msgspec.Struct, frozen=True):
    seconds: float
