"""The alpha monitor: evaluations that go up and down bring the staleness bound down, one by one, until they are steady.

    steady --fluctuation above unsteady_above--> lowering --below steady_below--> steady
                                                 each time by one, every ``alpha_wait`` evaluations, down to 0

Invariant: it never raises alpha. A person may (``set alpha``), and then only evaluations since that count.
Each verdict is in the evaluation's record, so a run that is resumed or led on by another process goes on where it was.

Fluctuation is the standard deviation over the mean of the last 20 evaluations: of their success rate, or of their mean
return where nothing succeeds. With ``steady_about: trend`` a straight line is taken off first, for runs that climb.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from coordinator.doctor.training import EVALUATIONS, unsteadiness
from coordinator.job import SchedulingSettings
from coordinator.observe.records import EvalRecord

NONE = -1
"""The alpha that evaluations have brought about where they have brought about none."""


class Verdict(NamedTuple):
    """On one evaluation."""

    record: EvalRecord  # with what was found
    alpha: int  # from now on
    said: str  # to people; "" where there is nothing to say


class AlphaMonitor:
    """See the module docstring. ``before``: the evaluations on record, oldest first."""

    def __init__(self, settings: SchedulingSettings, before: Iterable[EvalRecord] = ()) -> None:
        self._settings = settings
        self._window: deque[EvalRecord] = deque(maxlen=EVALUATIONS)
        self.lowered_to = NONE
        self._lowering = False
        self._wait = 0  # evaluations until alpha may be lowered
        for record in before:
            self._recall(record)

    def _recall(self, record: EvalRecord) -> None:
        self._window.append(record)
        self._wait = max(0, self._wait - 1)
        if record.lowered_to not in (NONE, self.lowered_to):
            self._wait = self._settings.alpha_wait
        self.lowered_to, self._lowering = record.lowered_to, record.lowering

    def judge(self, record: EvalRecord, alpha: int) -> Verdict:
        """``alpha``: the bound that there is now."""
        if self.lowered_to != NONE and alpha > self.lowered_to:  # a person has raised it
            self._window.clear()
            self.lowered_to, self._lowering, self._wait = NONE, False, 0
        self._window.append(record)
        self._wait = max(0, self._wait - 1)
        fluctuation, said = self._fluctuation(), ""
        if self._settings.watch_alpha and fluctuation is not None:
            alpha, said = self._decide(fluctuation, alpha)
        judged = msgspec.structs.replace(
            record, fluctuation=fluctuation, lowering=self._lowering, lowered_to=self.lowered_to
        )
        self._window[-1] = judged
        return Verdict(judged, alpha, said)

    def _fluctuation(self) -> float | None:
        """None where there are too few evaluations, or a mean of 0."""
        found = unsteadiness(self._window) if len(self._window) == EVALUATIONS else None
        if found is None:
            return None
        share = found.share if self._settings.steady_about == "mean" else found.about_the_trend
        return share if math.isfinite(share) else None

    def _decide(self, fluctuation: float, alpha: int) -> tuple[int, str]:
        settings, said = self._settings, ""
        percent = f"the last {EVALUATIONS} evaluations fluctuate by {fluctuation:.1%}"
        if self._lowering and fluctuation < settings.steady_below:
            self._lowering = False
            said = f"{percent}, below {settings.steady_below:.0%}: alpha stays at {alpha}"
        elif not self._lowering and fluctuation > settings.unsteady_above:
            self._lowering = True
            if alpha == 0:
                said = f"{percent}, above {settings.unsteady_above:.0%}; alpha is 0 already, so staleness is not why"
        if self._lowering and alpha > 0 and not self._wait:
            alpha -= 1
            self.lowered_to, self._wait = alpha, settings.alpha_wait
            said = f"{percent}: alpha was {alpha + 1} and is now {alpha}, until they do by less than "
            said += f"{settings.steady_below:.0%} (scheduling.watch_alpha)"
        return alpha, said
