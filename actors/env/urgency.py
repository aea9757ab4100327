"""Which trajectories go before others where engines or places are scarce.

Invariant: the rule is one, for what waits to be started (``coordinator.scheduling.queues``) and for what waits to go on
(engines take urgent requests first): evaluations, because the learner waits for them, and trajectories with fewer than
``SHORT_TURNS`` turns left, because they free a place soon and complete a group.

Among running trajectories nobody starves of it: a trajectory is urgent for its last few turns only, so that behind the
urgent ones there is always an end; what follows them begins as not urgent.
"""

from __future__ import annotations

from actors.env.messages import Purpose

SHORT_TURNS = 5
"""The brief's figure."""


def turns_left(bound: int, taken: int, estimate: int | None) -> int:
    """By the step bound, or fewer by the environment's own estimate."""
    left = bound - taken
    return left if estimate is None else min(left, estimate)


def is_urgent(purpose: Purpose, left: int) -> bool:
    return purpose == "evaluate" or left < SHORT_TURNS
