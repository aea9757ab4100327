"""What became of a run's hosts: lost, failed, replaced, quarantined, let back in; one line of ``hosts.jsonl`` each.

    {"time":1796042000.1,"event":"lost","host":"10.0.0.2","node":"proxy-1","roles":["proxy"],"reason":"..."}
    {"time":1796042000.2,"event":"quarantined","host":"10.0.0.2","seconds":600.0}
    {"time":1796042003.9,"event":"given","host":"10.0.0.4","node":"spare-3","roles":["proxy"]}
    {"time":1796042009.4,"event":"up","host":"10.0.0.4","node":"spare-3","roles":["proxy"]}
    {"time":1796043000.0,"event":"released","host":"10.0.0.2"}
    {"time":1796043100.2,"event":"standby_gone","host":"10.0.0.4","node":"spare-3","reason":"..."}

Invariants:

- the file tells which hosts are in quarantine, so that the next leader leaves out the same. Times are those of day, of
  the leader's machine: they outlive it, and the next one's clock may be behind (``quarantine``);
- what a leader sees gets there only while it is certain that it leads: one that is cut off hears of nobody, and takes
  everybody for lost. Until it is certain again its lines are kept back; they never get there where another one leads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec

from coordinator.leadership import SOLE
from coordinator.messages import Role
from coordinator.observe.lines import LineWriter, each_line
from coordinator.quarantine import Quarantine

log = logging.getLogger(__name__)


class HostEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """See the module docstring. ``lost``: the node is gone; ``failed``: its role cannot go on."""

    time: float
    event: Literal["lost", "failed", "quarantined", "given", "up", "released", "standby_gone"]
    host: str
    node: str = ""
    roles: list[Role] = []
    reason: str = ""
    seconds: float = 0.0


class HostBook:
    """See the module docstring."""

    def __init__(
        self,
        path: Path | None = None,
        clock: Callable[[], float] = time.time,
        leads: Callable[[], bool] = SOLE.leads,
    ) -> None:
        """Goes on from what the file holds. Raises ``OSError``."""
        self._clock = clock
        self._leads = leads
        self._kept_back: list[HostEvent] = []
        self._quarantine = Quarantine()
        self._writer: LineWriter | None = None
        if path is not None:
            for event in each_line(path, msgspec.json.Decoder(HostEvent).decode, lambda: None):
                if event.event in ("lost", "failed"):
                    self._quarantine.failed(event.host, event.time)
                elif event.event == "released":
                    self._quarantine.release(event.host, event.time)
            self._writer = LineWriter(path)

    def fell(self, event: Literal["lost", "failed"], host: str, node: str, roles: Iterable[Role], reason: str) -> None:
        """A node was lost or one of its roles failed."""
        now = self._clock()
        already = host in self._quarantine.barred(now)
        seconds = self._quarantine.failed(host, now)
        self._write(HostEvent(now, event, host, node, list(roles), reason))
        if seconds and not already:
            log.error("host %s fails again and again: it is left out for %.0f s", host, seconds)
            self._write(HostEvent(now, "quarantined", host, seconds=seconds))

    def given(self, host: str, node: str, roles: Iterable[Role]) -> None:
        """A spare is to have these roles."""
        self._write(HostEvent(self._clock(), "given", host, node, list(roles)))

    def up(self, host: str, node: str, role: Role) -> None:
        self._write(HostEvent(self._clock(), "up", host, node, [role]))

    def lost_standby(self, host: str, node: str, reason: str) -> None:
        """The standby coordinator beside a spare is not started again."""
        self._write(HostEvent(self._clock(), "standby_gone", host, node, reason=reason))

    def release(self, host: str) -> bool:
        """Let a host back in; whether it was left out."""
        now = self._clock()
        released = self._quarantine.release(host, now)
        if released:
            self._write(HostEvent(now, "released", host))
        return released

    def barred(self) -> dict[str, float]:
        """Hosts that are left out, and for how many seconds more."""
        return self._quarantine.barred(self._clock())

    def failures(self, host: str) -> int:
        return self._quarantine.failures(host, self._clock())

    def _write(self, event: HostEvent) -> None:
        self._kept_back.append(event)
        self.settle()

    def settle(self) -> None:
        """Write what was kept back, if this process leads for certain by now."""
        if not self._leads():
            return
        events, self._kept_back = self._kept_back, []
        if self._writer is None or not events:
            return
        try:
            self._writer.write_all(events)
        except OSError as error:  # a full disk: the ledger says so, and ends the run
            log.warning("%s", error)

    def close(self) -> None:
        self.settle()
        if self._writer is not None:
            self._writer.close()
