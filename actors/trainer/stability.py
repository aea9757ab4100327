"""What keeps a run's steps within bounds, whatever a batch says: how large a step's gradient may be.

Invariant: the bound of a step follows from its version alone, so a run that is resumed clips as one that was not
interrupted.
"""

from __future__ import annotations

from actors.settings import TrainSettings


def clip_threshold(settings: TrainSettings, version: int) -> float:
    """The greatest norm of the gradient in the step from ``version`` on: it falls on a straight line from
    ``max_grad_norm``, at version 0, to ``final_grad_norm``, at ``grad_norm_steps``, where it stays."""
    first, last = settings.max_grad_norm, min(settings.final_grad_norm, settings.max_grad_norm)
    over = settings.steps if settings.grad_norm_steps == "auto" else settings.grad_norm_steps
    return first + (last - first) * min(1.0, version / over)
