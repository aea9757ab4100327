"""What is lost while a run goes on, and when that is too much to go on.

Invariant: a run in which nothing works stops by itself, naming the reason, long before anybody would wait for a batch
in vain; a run that works pays for a fault of one kind with one warning.
"""

from __future__ import annotations

from collections import deque

from actors.env.messages import Outcome
from bus.message import BusError
from coordinator.messages import Role

EXPECTED_LOSSES = ("stale", "straggler", "aborted", "alike")
"""What the scheduler itself brings about."""

WINDOW = 200
"""Trajectories over which the share of losses is taken."""
MOST = 0.5


class RoleLost(BusError):
    """A role can no longer do its work; the message says why."""

    def __init__(self, role: Role, node: str, reason: str) -> None:
        super().__init__(f"{role} on node {node}: {reason}")
        self.role = role
        self.node = node


class NodeLost(RoleLost):
    """A node is gone, with all its roles; the message says how that was found out."""

    def __init__(self, role: Role, node: str, text: str) -> None:
        BusError.__init__(self, text)
        self.role = role
        self.node = node


class TooManyLosses(BusError):
    """Nothing but losses for long; the message has the last one's reason and what it said."""


class LossWatch:
    """Sees how every trajectory ends."""

    def __init__(self, in_a_row: int) -> None:
        """``in_a_row``: losses with nothing stored between them that are too many."""
        self._limit = in_a_row
        self._row = 0
        self._window: deque[bool] = deque(maxlen=WINDOW)
        self._warned = False
        self.details: dict[str, str] = {}  # reason -> what the last such loss said

    def ended(self, outcome: Outcome) -> str | None:
        """Note one end; returns a warning where one is due. Raises ``TooManyLosses``."""
        if outcome.state != "lost":
            self._row = 0
            self._window.append(False)
            return None
        detail = " ".join(outcome.detail.split())
        if outcome.reason in EXPECTED_LOSSES or not detail:  # a member that is only stopped has nothing to say
            return None
        self._row += 1
        self._window.append(True)
        new = outcome.reason not in self.details
        self.details[outcome.reason] = detail
        if self._row >= self._limit:
            raise TooManyLosses(
                f"{self._row} trajectories in a row were lost and none was stored (scheduling.losses_in_a_row); the "
                f"last, {outcome.ticket}, {outcome.reason}: {detail}"
            )
        if new:
            return f"trajectory {outcome.ticket} is lost, {outcome.reason}: {detail}"
        return self._mostly(outcome.reason, detail)

    def _mostly(self, reason: str, detail: str) -> str | None:
        share = sum(self._window) / len(self._window)
        if self._warned or len(self._window) < WINDOW or share <= MOST:
            return None
        self._warned = True
        return f"{share:.0%} of the last {WINDOW} trajectories were lost; the last one, {reason}: {detail}"
