"""EnvManagers: each runs one trajectory on its own timeline, with no barrier to any other.

    place -> reset -> ( prompt -> engine -> tokens -> environment )* -> reward -> store -> Outcome

Invariants:

- every ticket started here ends in exactly one ``Outcome``, whatever fails on the way, unless the host is stopped; it
  is sent until it is answered;
- at every turn, before anything is asked of an engine, a trajectory that can no longer be trained on stops and says
  so, and one at the step bound ends;
- scoring and storing happen after the environment's place is free again, off the rollout's path.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TypeVar

import numpy as np

from actors.core import Actor, Ref, handler
from actors.env.agents.play import Agents, Endpoint, Sessions
from actors.env.episode import Episode, Lost
from actors.env.framing import ActionNotOneToken, Framing
from actors.env.generation import Generation
from actors.env.messages import (
    CloseEnv,
    DescribeEnv,
    EnvState,
    Followed,
    FollowTrajectory,
    GetTickets,
    LearnerVersion,
    LeftPlaces,
    Noted,
    Outcome,
    ResetDone,
    ResetEnv,
    Start,
    StepDone,
    StepEnv,
    Stop,
    Ticket,
    TicketsHere,
)
from actors.env.peers import Peers, Workers
from actors.env.protocol import Observation
from actors.env.settling import Settling
from actors.env.urgency import is_urgent, turns_left
from actors.proxy.engines.protocol import CUT
from actors.proxy.messages import Finished, KeptSoFar, RequestFailed
from actors.settings import EnvironmentSettings, RolloutSettings
from bus.message import BusError, DeadlineExceeded, NoSuchActor, PeerLost, PeerRestarted, RemoteError

R = TypeVar("R")

log = logging.getLogger(__name__)

NOTHING = np.empty(0, np.int32)
REPORT_TIMEOUT_S = 60.0
REPORT_RETRIES = 10
LEFT_WITHIN_S = 0.02
"""How long the news that places are free waits for more of its kind."""
BEGINS_WITHIN_S = 10.0
"""How long whoever would follow the next trajectory waits for one to begin."""
HANGING_SHARE = 0.5
"""A worker hangs if a call passed its deadline and no other was answered for this share of it."""


class EnvHost(Actor):
    """Runs many EnvManagers; see the module docstring."""

    def __init__(
        self,
        environment: EnvironmentSettings,
        rollout: RolloutSettings,
        *,
        concurrent: int,
        reward_timeout_s: float,
        framing: Framing,
        pool: Workers,
        peers: Peers,
        sessions: Sessions | None = None,
        endpoint: Endpoint | None = None,
    ) -> None:
        """``sessions`` and ``endpoint``: of agents, where the job's environment is one."""
        self._environment = environment
        self._framing = framing
        self._pool = pool
        self._peers = peers
        self._places = asyncio.Semaphore(concurrent)
        self._episodes: dict[str, Episode] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._tickets: dict[str, Ticket] = {}  # of the tasks
        self._heard: dict[str, float] = {}  # worker -> when it last answered
        self._began = asyncio.Event()
        self._learner = LearnerVersion(version=0, alpha=1_000_000)
        self._counters: Counter[str] = Counter()
        self._generation = Generation(
            self, peers, rollout, environment=environment.name, framing=framing, counters=self._counters
        )
        self._settling = Settling(self, peers, reward_timeout_s=reward_timeout_s, check=self._check)
        self._agents: Agents | None = None
        if sessions is not None and endpoint is not None:
            self._agents = Agents(
                self,
                peers,
                pool,
                sessions,
                endpoint,
                generate=self._generation.generate,
                check=self._check,
                counters=self._counters,
            )
        self._more_wait = False
        self._left: list[str] = []

    async def on_start(self) -> None:
        if self._agents is not None:
            await self._agents.start()

    async def on_stop(self) -> None:
        self._left.clear()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._agents is not None:  # whose clients have been told that their sessions are over
            await self._agents.stop()

    # ---- messages ------------------------------------------------------------------------------------------------

    @handler
    async def start(self, message: Start) -> Noted:
        self._more_wait = message.more
        for ticket in message.tickets:
            if ticket.id in self._tasks:
                self._counters["repeated_starts"] += 1
                continue
            episode = self._episodes[ticket.id] = Episode(ticket, time.monotonic())
            self._tickets[ticket.id] = ticket
            self._tasks[ticket.id] = asyncio.create_task(self._manage(episode), name=f"trajectory {ticket.id}")
            self._began.set()
        return Noted()

    @handler
    async def stop(self, message: Stop) -> Noted:
        for id_ in message.tickets:
            episode = self._episodes.get(id_)
            if episode is not None:
                episode.stop(message.reason)
        return Noted()

    @handler(urgent=True)
    async def learner_version(self, message: LearnerVersion) -> None:
        self._learner = message

    @handler
    async def finished(self, message: Finished) -> None:
        self._generation.finished(message.completions)

    @handler
    async def kept_so_far(self, message: KeptSoFar) -> None:
        self._generation.kept(message)

    @handler
    async def request_failed(self, message: RequestFailed) -> None:
        self._generation.failed(message.request_id, Lost("engine_failed", message.reason))

    @handler(urgent=True)
    async def tickets_here(self, message: GetTickets) -> TicketsHere:
        return TicketsHere(list(self._tickets.values()))

    @handler(urgent=True)
    async def describe(self, message: DescribeEnv) -> EnvState:
        return EnvState([episode.describe() for episode in self._episodes.values()], dict(self._counters))

    @handler
    async def follow(self, message: FollowTrajectory) -> AsyncIterator[Followed]:
        """Raises ``ValueError`` for a trajectory that does not run here, or where none begins in time."""
        episode = self._episodes.get(message.ticket) if message.ticket else await self._youngest()
        if episode is None:
            raise ValueError(f"trajectory {message.ticket} does not run here any more, or not yet")
        async with aclosing(episode.follow()) as steps:
            async for step in steps:
                yield step

    async def _youngest(self) -> Episode:
        """The one that began last, if need be once one begins."""
        try:
            async with asyncio.timeout(BEGINS_WITHIN_S):
                while not self._episodes:
                    self._began.clear()
                    await self._began.wait()
        except TimeoutError:
            raise ValueError(
                f"no trajectory has begun on {self.node.address.name} within {BEGINS_WITHIN_S:g} s: the run is paused, "
                "trains or evaluates elsewhere, or has ended; try again, or name one"
            ) from None
        episodes = list(self._episodes.values())
        return next((episode for episode in reversed(episodes) if episode.state != "place"), episodes[-1])

    # ---- one trajectory ------------------------------------------------------------------------------------------

    async def _manage(self, episode: Episode) -> None:
        """Run one ticket to its outcome, and see that it arrives."""
        try:
            outcome = await self._ended(episode)
            await self._report(outcome)
        finally:
            del self._tasks[episode.ticket.id], self._tickets[episode.ticket.id]

    async def _report(self, outcome: Outcome) -> None:
        about = f"trajectory {outcome.ticket}"
        try:
            await self._peers.leader.ask(
                self.node, outcome, Noted, timeout_s=REPORT_TIMEOUT_S, retries=REPORT_RETRIES, about=about
            )
        except BusError as error:  # the run is over, or will end for want of its coordinator
            self._counters["unreported"] += 1
            log.info("%s: its outcome (%s) has not arrived: %s", about, outcome.state, error)

    async def _ended(self, episode: Episode) -> Outcome:
        ticket = episode.ticket
        try:
            outcome = await self._run(episode)
        except Lost as loss:
            outcome = self._lost(episode, loss)
        except BusError as error:
            outcome = self._lost(episode, Lost("infrastructure", str(error)))
        except Exception as error:  # a fault of ours must cost one trajectory, and say so
            log.exception("trajectory %s failed", ticket.id, extra={"trajectory": ticket.id})
            outcome = self._lost(episode, Lost("internal_error", repr(error)))
        finally:
            del self._episodes[ticket.id]
        episode.end(outcome)
        self._counters[f"lost_{outcome.reason}" if outcome.state == "lost" else outcome.state] += 1
        return outcome

    def _lost(self, episode: Episode, loss: Lost) -> Outcome:
        """A trajectory that was told to stop ends for that reason, whatever ended it in the end."""
        if episode.stop_reason is not None:
            loss = Lost(episode.stop_reason)
        else:
            log.info("trajectory %s is lost: %s", episode.ticket.id, loss, extra={"trajectory": episode.ticket.id})
        return episode.lost(loss)

    async def _run(self, episode: Episode) -> Outcome:
        await self._place(episode)
        try:
            await (self._play(episode) if self._agents is None else self._agents.play(episode))
        finally:
            self._places.release()
        if episode.ticket.purpose == "evaluate":
            return episode.outcome("evaluated", episode.env_return)
        if self._more_wait:
            self._tell_left(episode.ticket.id)
        return await self._settling.settle(episode)

    def _tell_left(self, ticket: str) -> None:
        self._left.append(ticket)
        if len(self._left) == 1:
            asyncio.get_running_loop().call_later(LEFT_WITHIN_S, self._tell_all_left)

    def _tell_all_left(self) -> None:
        left, self._left = self._left, []
        if left:
            self._peers.leader.tell(self.node, LeftPlaces(left))

    def _check(self, episode: Episode) -> None:
        """Raises ``Lost``."""
        episode.check(self._learner)

    async def _place(self, episode: Episode) -> None:
        """Wait for a free place, as long as others keep them (each is bound by its own deadlines), or to be stopped."""
        acquiring = asyncio.ensure_future(self._places.acquire())
        episode.interrupt = acquiring.cancel
        try:
            await acquiring
        except asyncio.CancelledError:
            self._check(episode)  # raises if it was stopped; else this host is being stopped
            raise
        finally:
            episode.interrupt = None

    async def _play(self, episode: Episode) -> None:
        """From reset to the last step."""
        self._check(episode)
        whole, worker_name = False, self._pool.pick()
        episode.state = "reset"
        try:
            worker = await self._pool.worker(worker_name)
        except PeerLost as error:
            raise Lost("env_worker_died", str(error)) from None
        try:
            reset = await self._in_worker(
                worker, worker_name, ResetEnv(episode.ticket.id, episode.ticket.task), ResetDone, episode
            )
            opening = self._framing.opening(reset.system_prompt, reset.observation.text)
            episode.recorder.start(opening, reset.observation.text)
            observation = reset.observation
            while True:
                action = await self._act(episode, observation)
                episode.state = "environment"
                done = await self._in_worker(worker, worker_name, StepEnv(episode.ticket.id, action), StepDone, episode)
                episode.env_return, episode.success, episode.metrics = done.env_return, done.success, done.metrics
                observation = done.step.observation
                over = done.step.terminated or done.step.truncated
                if over or episode.recorder.turns >= self._environment.max_turns:
                    episode.recorder.observed(NOTHING, observation.text)
                    whole = True
                    return
                following = self._framing.following(observation.text, episode.last_token)
                episode.recorder.observed(following, observation.text)
        finally:
            self.node.tell(worker, CloseEnv(episode.ticket.id))
            self._peers.proxies.ended(self.node, episode.ticket.id, whole=whole)

    async def _act(self, episode: Episode, observation: Observation) -> str:
        """One turn: what the policy answers to an observation."""
        self._check(episode)
        episode.state = "engine"
        try:
            allowed = self._framing.allowed(observation.actions) if observation.actions else None
        except ActionNotOneToken as error:
            raise Lost("env_failed", str(error)) from None
        left = turns_left(self._environment.max_turns, episode.recorder.turns, observation.turns_left)
        completion = await self._generation.generate(episode, allowed, urgent=is_urgent(episode.ticket.purpose, left))
        if completion.finish_reason in CUT:
            raise Lost(episode.stop_reason or completion.finish_reason, "cut while it generated")
        text = self._framing.action(completion.tokens)
        episode.recorder.sampled(completion.tokens, completion.logprobs, completion.versions, allowed, text)
        episode.took(completion.tokens)
        return text

    async def _in_worker(
        self, worker: Ref, name: str, message: ResetEnv | StepEnv, reply: type[R], episode: Episode
    ) -> R:
        """Ask the environment; what goes wrong there costs this trajectory, under a reason."""
        about = f"trajectory {episode.ticket.id}, turn {episode.recorder.turns}"
        try:
            answer = await self.node.ask(
                worker, message, reply, timeout_s=self._environment.step_timeout_s, about=about
            )
        except RemoteError as error:
            self._note_sign_of_life(name)
            raise Lost("env_failed", error.remote_message) from None
        except DeadlineExceeded as error:
            self._kill_if_hanging(name)
            raise Lost("env_timeout", str(error)) from None
        except (PeerLost, PeerRestarted, NoSuchActor) as error:
            raise Lost("env_worker_died", str(error)) from None
        self._note_sign_of_life(name)
        return answer

    def _note_sign_of_life(self, worker: str) -> None:
        self._heard[worker] = asyncio.get_running_loop().time()

    def _kill_if_hanging(self, worker: str) -> None:
        """A worker that has answered nobody for long hangs, and with it everything behind what it does; one that is
        merely slow is left to work off what it has."""
        silence_s = asyncio.get_running_loop().time() - self._heard.get(worker, -math.inf)
        if silence_s >= HANGING_SHARE * self._environment.step_timeout_s:
            self._pool.kill(worker)
