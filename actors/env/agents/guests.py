"""Sessions that no ticket started: whoever has the token of an env host opens them, by name, and they are recorded.

    Authorization: Bearer TOKEN.NAME       the first request opens the session NAME
    GET /v1/sessions                       what there is of them
    GET /v1/sessions/NAME                  one, with its exact token ids and log-probabilities so far
    DELETE /v1/sessions/NAME               ends it (else it ends once nothing was asked of it for a while)

Invariant: a session that was answered something is on disk, as a record of ``actors.trainer.store``, soon after it has
ended; it is never trained on by the run that served it, and no name is used twice.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from actors.env.agents.asked import Refused
from actors.env.agents.session import Session
from actors.env.episode import Episode
from actors.env.messages import Ticket
from actors.settings import AgentSettings
from actors.trainer.store import append_record
from actors.trajectory import Segment, Trajectory

log = logging.getLogger(__name__)

ENDED_KEPT = 10_000
"""Sessions that have ended and are still listed."""

BYTES_OF_TOKEN = 32
"""As it is told: an id, a mask, a log-probability and a version."""

_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


class Guest(msgspec.Struct, frozen=True):
    """One session, as it is listed."""

    name: str
    ended: str  # how; empty while it is open
    turns: int
    sampled_tokens: int
    seconds: float  # since it began, or that it took


class Record(msgspec.Struct, frozen=True):
    """One session, with what is recorded of it."""

    guest: Guest
    segments: list[Segment]

    @property
    def size(self) -> int:
        """About how many bytes ``plain`` makes as JSON."""
        return sum(BYTES_OF_TOKEN * len(segment.tokens) for segment in self.segments)

    def plain(self) -> dict[str, Any]:
        return {**msgspec.to_builtins(self.guest), "segments": [_plain(segment) for segment in self.segments]}


class _Open:
    def __init__(self, session: Session) -> None:
        self.session = session
        self.began = time.monotonic()
        self.idle: asyncio.TimerHandle | None = None


class Guests:
    """See the module docstring."""

    def __init__(
        self,
        settings: AgentSettings,
        *,
        temperature: float,
        make: Callable[[Episode], Session],
        ended: Callable[[str], None],
        records: Path,
        counters: Counter[str],
    ) -> None:
        """``ended`` is told of each trajectory by which nothing more will be asked; ``records``: the file."""
        self.token = f"sk-{secrets.token_urlsafe(24)}"
        self._settings = settings
        self._temperature = temperature
        self._make = make
        self._told_ended = ended
        self._records = records
        self._counters = counters
        self._open: dict[str, _Open] = {}
        self._ended: OrderedDict[str, Guest] = OrderedDict()
        self._opened = 0
        self._closing = False
        self._writing: set[asyncio.Task[None]] = set()
        self._file = asyncio.Lock()

    async def stop(self) -> None:
        """All end here, and none is let in any more; returns when they are on disk."""
        self._closing = True
        for name in list(self._open):
            self._end(name, "the endpoint has closed")
        await asyncio.gather(*self._writing)

    def session(self, name: str) -> Session:
        """The session of this name, which is opened where there is none. Raises ``Refused``."""
        guest = self._open.get(name) or self._admitted(name)
        if guest.idle is not None:
            guest.idle.cancel()
        guest.idle = asyncio.get_running_loop().call_later(self._settings.guest_idle_s, self._look, name)
        return guest.session

    def listed(self) -> list[Guest]:
        """Those that are open, then those that have ended, the last first."""
        return [self._described(name) for name in self._open] + list(reversed(self._ended.values()))

    def told(self, name: str) -> Record:
        """One of them, with what is recorded where it is open. Raises ``Refused``."""
        described, guest = self._described(name), self._open.get(name)
        if guest is None or not guest.session.episode.recorder.turns:
            return Record(described, [])
        return Record(described, guest.session.episode.finish().segments)

    def end(self, name: str) -> Record:
        """End a session; what it was. Raises ``Refused``."""
        told = self.told(name)
        if name in self._open:
            self._end(name, "its client has ended it")
        return Record(msgspec.structs.replace(told.guest, ended=self._ended[name].ended), told.segments)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _admitted(self, name: str) -> _Open:
        if _NAME.fullmatch(name) is None:
            what = f"a session's name has 1 to 64 letters, digits, dots, dashes or underscores, found {name!r}"
            raise Refused(401, what, code="invalid_api_key")
        if name in self._ended:
            how = self._ended[name].ended
            raise Refused(410, f"session {name} has ended: {how}; use another name", code="session_ended")
        if self._closing:
            raise Refused(503, "the endpoint is closing", code="closing")
        if len(self._open) >= self._settings.guests:
            self._counters["guests_refused"] += 1
            what = f"{len(self._open)} sessions are open, as many as there may be (environment.agent.guests)"
            raise Refused(429, what, code="too_many_sessions")
        index, self._opened = self._opened, self._opened + 1
        seed = secrets.randbelow(2**31)
        ticket = Ticket(f"guest{index}-{name}", index, 0, "evaluate", self._temperature, seed)
        session = self._make(Episode(ticket, time.monotonic()))
        session.over.add_done_callback(lambda over: self._end(name, str(over.exception())))
        guest = self._open[name] = _Open(session)
        return guest

    def _look(self, name: str) -> None:
        """Nothing was asked for a while; what is being answered is waited for."""
        guest = self._open[name]
        if guest.session.busy:
            guest.idle = asyncio.get_running_loop().call_later(self._settings.guest_idle_s, self._look, name)
        else:
            self._end(name, f"nothing was asked for {self._settings.guest_idle_s:g} s (environment.agent.guest_idle_s)")

    def _end(self, name: str, how: str) -> None:
        if name not in self._open:
            return
        described = self._described(name)
        guest = self._open.pop(name)
        if guest.idle is not None:
            guest.idle.cancel()
        guest.session.close(how)
        self._ended[name] = msgspec.structs.replace(described, ended=how)
        if len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)
        episode = guest.session.episode
        self._told_ended(episode.ticket.id)
        self._counters["guests_ended"] += 1
        if episode.recorder.turns:
            task = asyncio.create_task(self._write(episode.finish()))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _write(self, trajectory: Trajectory) -> None:
        async with self._file:
            try:
                await asyncio.to_thread(append_record, self._records, trajectory)
            except OSError as error:
                self._counters["guests_unrecorded"] += 1
                log.error("session %s is not recorded: %s: %s", trajectory.ticket, self._records, error)

    def _described(self, name: str) -> Guest:
        """Raises ``Refused``."""
        guest = self._open.get(name)
        if guest is None:
            if name not in self._ended:
                raise Refused(404, f"no such session: {name}", code="not_found")
            return self._ended[name]
        recorder = guest.session.episode.recorder
        return Guest(name, "", recorder.turns, recorder.sampled_tokens, time.monotonic() - guest.began)


def _plain(segment: Segment) -> dict[str, Any]:
    names = ("tokens", "loss_mask", "logprobs", "versions")
    return {name: getattr(segment, name).tolist() for name in names}
