"""Agents as the environments of trajectories: a ticket is a session, what its agent asks are its turns.

    ticket -> session (a key) -> the agent runs in a worker -> its requests, by way of the endpoint -> engines
                                                            -> its result

Invariant: a session is open exactly as long as its agent runs for its trajectory; however one of them ends, the other
does, and what goes wrong costs one trajectory, under a reason.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from actors.env.agents.asked import Refused
from actors.env.agents.conversation import Renderer
from actors.env.agents.guests import Guests
from actors.env.agents.protocol import Result
from actors.env.agents.protocol import Session as Told
from actors.env.agents.session import Generate, Rules, Session, session_ended
from actors.env.episode import Episode, Lost
from actors.env.messages import AgentDone, RunAgent
from actors.env.peers import Hands, Peers, Workers
from actors.settings import AgentSettings
from bus.message import DeadlineExceeded, NoSuchActor, PeerLost, PeerRestarted, RemoteError

ENDED_KEPT = 10_000
"""Sessions that have ended and whose keys are still told how."""


class Endpoint(Protocol):
    """Where agents ask (``actors.env.agents.server``)."""

    async def start(self, sessions: Sessions) -> str:
        """Listen; returns the base URL. Raises ``OSError``."""

    async def stop(self) -> None: ...


class Sessions:
    """The sessions of an env host, by key."""

    def __init__(
        self, settings: AgentSettings, rules: Rules, renderer: Renderer, directory: Path | None = None
    ) -> None:
        """``directory``: where the token and the records of guests go, if there may be any."""
        self.directory = directory if settings.guests else None
        self.guests: Guests | None = None
        self.settings = settings
        self.rules = rules
        self.renderer = renderer
        self._open: dict[str, Session] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()  # how; a session itself may be as large as its context

    def open(self, make: Callable[[], Session]) -> tuple[str, Session]:
        """A new one, and its key."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        session = self._open[key] = make()
        return key, session

    def close(self, key: str, how: str) -> None:
        session = self._open.pop(key)
        session.close(how)
        self._ended[key] = session.over_by(session.ended)
        if len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    def of(self, key: str) -> Session:
        """Raises ``Refused``."""
        session = self._open.get(key)
        if session is not None:
            return session
        if key in self._ended:
            raise session_ended(self._ended[key])
        guests, name = self.guests_of(key)
        return guests.session(name)

    def guests_of(self, key: str) -> tuple[Guests, str]:
        """Whom the token in a key lets in, and the session's name behind it. Raises ``Refused``."""
        token, _, name = key.partition(".")
        if self.guests is None or not secrets.compare_digest(_as_sent(token), self.guests.token.encode()):
            raise Refused(401, "the API key belongs to no session of this endpoint", code="invalid_api_key")
        return self.guests, name


class Agents:
    """See the module docstring."""

    def __init__(
        self,
        hands: Hands,
        peers: Peers,
        pool: Workers,
        sessions: Sessions,
        endpoint: Endpoint,
        *,
        generate: Generate,
        check: Callable[[Episode], None],
        counters: Counter[str],
    ) -> None:
        self._hands = hands
        self._peers = peers
        self._pool = pool
        self._sessions = sessions
        self._endpoint = endpoint
        self._generate = generate
        self._check = check
        self._counters = counters
        self._base_url = ""

    async def start(self) -> None:
        sessions, name = self._sessions, self._hands.node.address.name
        self._base_url = await self._endpoint.start(sessions)
        if sessions.directory is not None:
            without_bound = msgspec.structs.replace(sessions.rules, max_turns=sys.maxsize)
            sessions.guests = Guests(
                sessions.settings,
                temperature=sessions.rules.temperature,
                make=lambda episode: self._session(episode, without_bound),
                ended=lambda trajectory: self._tell_ended(trajectory, whole=False),
                records=sessions.directory / f"{name}.log",
                counters=self._counters,
            )
            write_door(sessions.directory / f"{name}.json", Door(self._base_url, sessions.guests.token))

    async def stop(self) -> None:
        if self._sessions.guests is not None:
            await self._sessions.guests.stop()
        await self._endpoint.stop()

    async def play(self, episode: Episode) -> None:
        """From the session's start to the agent's result. Raises ``Lost``."""
        self._check(episode)
        sessions = self._sessions
        key, session = sessions.open(
            lambda: self._session(episode, sessions.rules, urgent=episode.ticket.purpose == "evaluate")
        )
        how, whole = "it was cut off", False
        try:
            result = await self._result(session, Told(episode.ticket.task, self._base_url, key, sessions.rules.model))
            how, whole = "its agent has returned", True
        except Lost as loss:
            how = str(loss)
            raise
        finally:
            sessions.close(key, how)
            self._tell_ended(episode.ticket.id, whole=whole)
        if not episode.recorder.turns:
            raise Lost("agent_asked_nothing", f"{_who(episode)}: its agent returned without asking the endpoint")
        episode.env_return, episode.metrics = result.reward, dict(result.metrics)
        episode.success = result.reward > 0 if result.success is None else result.success

    def _session(self, episode: Episode, rules: Rules, *, urgent: bool = False) -> Session:
        return Session(
            episode,
            self._sessions.renderer,
            rules,
            generate=self._generate,
            check=self._check,
            urgent=urgent,
            counters=self._counters,
        )

    def _tell_ended(self, trajectory: str, *, whole: bool) -> None:
        self._peers.proxies.ended(self._hands.node, trajectory, whole=whole)

    async def _result(self, session: Session, told: Told) -> Result:
        """The agent's, unless the session ends before. Raises ``Lost``."""
        episode = session.episode
        episode.state = "environment"
        running: asyncio.Future[Result] = asyncio.ensure_future(self._run(episode, told))
        ends: set[asyncio.Future[Any]] = {running, session.over}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if session.over.done():
                session.over.result()  # raises the loss
            return running.result()
        except _Failed as error:
            if not session.cut:
                raise Lost("agent_failed", str(error)) from None
            return Result(0.0, success=False, metrics={session.cut: 1.0})  # it did not get over being cut
        finally:
            running.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, if it comes too late
            running.cancel()

    async def _run(self, episode: Episode, told: Told) -> Result:
        """Raises ``Lost``, ``_Failed``."""
        name = self._pool.pick()
        about = _who(episode)
        try:
            worker = await self._pool.worker(name)
            done = await self._hands.node.ask(
                worker, RunAgent(told), AgentDone, timeout_s=self._sessions.settings.timeout_s, about=about
            )
        except RemoteError as error:
            if error.kind != "Clogged":
                raise _Failed(error.remote_message) from None
            self._pool.kill(name)
            raise Lost("env_worker_died", f"{about}: {error.remote_message}") from None
        except DeadlineExceeded as error:
            raise Lost("agent_timeout", f"{error} (environment.agent.timeout_s)") from None
        except (PeerLost, PeerRestarted, NoSuchActor) as error:
            raise Lost("env_worker_died", str(error)) from None
        return done.result


class Door(msgspec.Struct, frozen=True):
    """How guests come in; in a file that nobody else can read."""

    base_url: str
    token: str


def write_door(path: Path, door: Door) -> None:
    """Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(door) + b"\n")


class _Failed(Exception):
    """The agent raised, or returned what it should not."""


def _as_sent(header: str) -> bytes:
    """The bytes of a header, which may be no UTF-8."""
    return header.encode("utf-8", "surrogateescape")


def _who(episode: Episode) -> str:
    return f"trajectory {episode.ticket.id}, turn {episode.recorder.turns}"
