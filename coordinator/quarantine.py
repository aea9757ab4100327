"""Hosts that keep failing are left out for a while, each time for longer.

    ok --FAILURES within WINDOW_S--> quarantined for FIRST_S, twice that the next time, ... MOST_S
     ^                                     |
     +------ the time is over, or a person lets it back in ------+   (after FORGIVEN_S without one: FIRST_S again)

Invariant: what is here follows from the failures and releases that it was told of, with their times, so that whoever
reads them again (another leader) comes to the same. Times are those of the caller's clock, which may be behind the one
before it, on another machine: what seems to be yet to come counts as recent.
"""

from __future__ import annotations

FAILURES = 3
WINDOW_S = 600.0
ONE_BLOW_S = 15.0
"""What fails on a host so soon after something else there fails for the same reason, and counts once."""
FIRST_S = 600.0
MOST_S = 24 * 3600.0
FORGIVEN_S = 24 * 3600.0


class _Host:
    def __init__(self) -> None:
        self.failed: list[float] = []
        self.quarantines = 0
        self.until = float("-inf")


class Quarantine:
    """See the module docstring."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}

    def failed(self, host: str, now: float) -> float:
        """One of its roles failed, or it was lost. Returns for how long it is left out from now on; 0 for not."""
        entry = self._hosts.setdefault(host, _Host())
        if now < entry.until:  # what fails there does so because of what led to it
            return entry.until - now
        if now - entry.until > FORGIVEN_S:
            entry.quarantines = 0
        if entry.failed and abs(now - entry.failed[-1]) < ONE_BLOW_S:
            return 0.0
        entry.failed = [each for each in entry.failed if each > now - WINDOW_S] + [now]
        if len(entry.failed) < FAILURES:
            return 0.0
        entry.failed.clear()
        period = min(MOST_S, FIRST_S * 2.0**entry.quarantines)
        entry.quarantines += 1
        entry.until = now + period
        return period

    def release(self, host: str, now: float) -> bool:
        """Let it back in, with a clean slate for its failures; whether it was left out. The next time is longer all
        the same."""
        entry = self._hosts.get(host)
        if entry is None or now >= entry.until:
            return False
        entry.until = now
        return True

    def barred(self, now: float) -> dict[str, float]:
        """Hosts that are left out, and for how much longer."""
        return {host: entry.until - now for host, entry in self._hosts.items() if now < entry.until}

    def failures(self, host: str, now: float) -> int:
        """That count at the moment."""
        entry = self._hosts.get(host)
        return 0 if entry is None else sum(each > now - WINDOW_S for each in entry.failed)
