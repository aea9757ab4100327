"""What the reward actor is asked."""

from __future__ import annotations

import msgspec

from actors.trajectory import Trajectory


class Score(msgspec.Struct, frozen=True):
    """Score a finished trajectory; its ``reward`` field is not set yet."""

    trajectory: Trajectory


class Scored(msgspec.Struct, frozen=True):
    reward: float
