"""A batch, step by step: what the trainer would make of each trajectory, and where it first stops being a number.

Invariant: the figures are the trainer's own (advantages from ``make_batch``, the rest from the backend's ``inspect``
under the weights that are named), nothing is trained, and a figure that is not finite is shown as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from actors.env.tokenizers import Tokenizer
from actors.trainer.backends.protocol import Inspection
from actors.trainer.messages import InspectedGroups
from actors.trajectory import FULL_VOCABULARY, Segment, Trajectory


class TrajectoryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory of the batch. Log-probabilities and ratios are over its sampled tokens."""

    ticket: str
    group: int
    success: bool
    reward: float
    advantage: float
    tokens: int  # sampled
    logprob_rollout: float  # mean
    logprob: float  # mean, under these weights
    ratio_mean: float
    ratio_min: float
    ratio_max: float
    loss: float  # its share of the batch's
    gradient_norm: float  # of its share


class NotANumber(msgspec.Struct, frozen=True):
    """The first figure that is not finite."""

    ticket: str
    figure: str
    value: str
    segment: int = -1  # -1: it belongs to no token
    position: int = -1  # in the segment
    token: int = -1

    def __str__(self) -> str:
        where = f", segment {self.segment}, position {self.position} (token {self.token})" if self.position >= 0 else ""
        return f"trajectory {self.ticket}{where}: {self.figure} is {self.value}"


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """A batch under some weights."""

    loss: float
    gradient_norm: float  # before clipping
    tokens: int
    trajectories: list[TrajectoryFigures]
    first_not_finite: NotANumber | None


class TokenFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled token."""

    position: int  # in its segment
    id: int
    text: str
    allowed: int | None  # how many tokens could have been chosen; None is the whole vocabulary
    version: int  # that sampled it
    logprob_rollout: float
    logprob: float
    ratio: float
    loss: float


class Turn(msgspec.Struct, frozen=True):
    """One turn of a trajectory."""

    observation: str
    action: str
    tokens: list[TokenFigures]


def replayed(groups: Sequence[Sequence[Trajectory]], inspected: InspectedGroups) -> Replayed:
    """The batch as figures, in its order."""
    inspection, trajectories = inspected.inspection, [trajectory for group in groups for trajectory in group]
    advantages = {sequence.ticket: sequence.advantage for sequence in inspected.batch.sequences}
    places = _places(trajectories)
    figures = [
        _figures(trajectory, advantages[trajectory.ticket], inspection, places[trajectory.ticket])
        for trajectory in trajectories
    ]
    return Replayed(
        loss=float(sum(losses.astype(np.float64).sum() for losses in inspection.losses)),
        gradient_norm=inspection.gradient_norm,
        tokens=sum(trajectory.sampled_tokens for trajectory in trajectories),
        trajectories=figures,
        first_not_finite=next(_not_finite(trajectories, advantages, inspection, places), None),
    )


def _places(trajectories: Sequence[Trajectory]) -> dict[str, range]:
    """Which of the batch's segments belong to whom."""
    places: dict[str, range] = {}
    start = 0
    for trajectory in trajectories:
        places[trajectory.ticket] = range(start, start + len(trajectory.segments))
        start += len(trajectory.segments)
    return places


def _figures(trajectory: Trajectory, advantage: float, inspection: Inspection, place: range) -> TrajectoryFigures:
    masks = [segment.loss_mask == 1 for segment in trajectory.segments]
    pairs = list(zip(place, masks, strict=True))
    ratios = np.concatenate([inspection.ratios[index][mask] for index, mask in pairs])
    logprobs = np.concatenate([inspection.logprobs[index][mask] for index, mask in pairs])
    losses = np.concatenate([inspection.losses[index][mask] for index, mask in pairs])
    recorded = [segment.logprobs[mask] for segment, mask in zip(trajectory.segments, masks, strict=True)]
    return TrajectoryFigures(
        ticket=trajectory.ticket,
        group=trajectory.group,
        success=trajectory.success,
        reward=trajectory.reward,
        advantage=advantage,
        tokens=trajectory.sampled_tokens,
        logprob_rollout=float(np.concatenate(recorded).mean()),
        logprob=float(logprobs.mean()),
        ratio_mean=float(ratios.mean()),
        ratio_min=float(ratios.min()),
        ratio_max=float(ratios.max()),
        loss=float(losses.astype(np.float64).sum()),
        gradient_norm=inspection.gradient_norms[trajectory.ticket],
    )


def _not_finite(
    trajectories: Sequence[Trajectory], advantages: dict[str, float], inspection: Inspection, places: dict[str, range]
) -> Iterator[NotANumber]:
    """Every figure that is not finite: trajectory by trajectory, causes before what follows from them."""
    for trajectory in trajectories:
        ticket = trajectory.ticket
        for figure, value in (("the reward", trajectory.reward), ("the advantage", advantages[ticket])):
            if not math.isfinite(value):
                yield NotANumber(ticket, figure, str(value))
        for number, (index, segment) in enumerate(zip(places[ticket], trajectory.segments, strict=True)):
            columns = {
                "the rollout's log-probability": segment.logprobs,
                "the log-probability": inspection.logprobs[index],
                "the ratio": inspection.ratios[index],
                "the loss": inspection.losses[index],
            }
            yield from _tokens_not_finite(ticket, number, segment, columns)
        norm = inspection.gradient_norms[ticket]
        if not math.isfinite(norm):
            yield NotANumber(ticket, "the gradient's norm", str(norm))


def _tokens_not_finite(
    ticket: str, number: int, segment: Segment, columns: dict[str, np.ndarray]
) -> Iterator[NotANumber]:
    for position in np.flatnonzero(segment.loss_mask == 1):
        for figure, values in columns.items():
            if not np.isfinite(values[position]):
                token = int(segment.tokens[position])
                yield NotANumber(ticket, figure, str(values[position]), number, int(position), token)


def turns_of(trajectory: Trajectory, inspection: Inspection, first: int, tokenizer: Tokenizer) -> list[Turn]:
    """The trajectory turn by turn; ``first`` is the place of its first segment in the batch. A turn is a run of sampled
    tokens; texts are the transcript's where it has as many turns, else what the tokens say."""
    runs = [
        [_token(trajectory, (number, position), inspection, first, tokenizer) for position in run]
        for number, segment in enumerate(trajectory.segments)
        for run in _runs(segment.loss_mask)
    ]
    actions = [text for speaker, text in trajectory.transcript if speaker == "action"]
    if len(actions) != len(runs):
        return [Turn("", tokenizer.decode(np.array([token.id for token in run])), run) for run in runs]
    told = zip(_observations(trajectory.transcript), actions, runs, strict=True)
    return [Turn(observation, action, run) for observation, action, run in told]


def _token(
    trajectory: Trajectory, place: tuple[int, int], inspection: Inspection, first: int, tokenizer: Tokenizer
) -> TokenFigures:
    """``place``: number of the segment, position in it."""
    number, position = place
    segment = trajectory.segments[number]
    allowed = int(segment.allowed[position])
    return TokenFigures(
        position=position,
        id=int(segment.tokens[position]),
        text=tokenizer.decode(segment.tokens[position : position + 1]),
        allowed=None if allowed == FULL_VOCABULARY else len(trajectory.allowed_sets[allowed]),
        version=int(segment.versions[position]),
        logprob_rollout=float(segment.logprobs[position]),
        logprob=float(inspection.logprobs[first + number][position]),
        ratio=float(inspection.ratios[first + number][position]),
        loss=float(inspection.losses[first + number][position]),
    )


def _runs(mask: np.ndarray) -> list[range]:
    """Where the mask is 1, as runs."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask == 1, [0]]).astype(np.int8)))
    return [range(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _observations(transcript: Sequence[tuple[str, str]]) -> list[str]:
    """What was read before each action."""
    before, seen = [], ""
    for speaker, text in transcript:
        if speaker == "action":
            before.append(seen)
            seen = ""
        else:
            seen = f"{seen}\n{text}" if seen else text
    return before
