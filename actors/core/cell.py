"""The life of one actor on its node: start, take messages one at a time, restart within bounds, stop.

    START -> RUNNING -> (handler of a tell raises) -> restart, as `Restarts` allow -> RUNNING
                     -> (stop, or no restart left) -> STOPPED, of which its monitors and links are told

Invariant: at most one handler that is not ``concurrent``, or one hook, runs at any time, and every message that was
accepted is answered, if only with what ended the actor.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from actors.core.actor import Actor
from actors.core.envelope import Envelope
from actors.core.holdings import Holdings
from actors.core.logs import acting
from actors.core.mailbox import Mailbox
from actors.core.metrics import BOUNDS_S, LANES, SLOW_S, ActorDescription, Metrics
from actors.core.restarts import Budget, Restarts
from bus.message import ActorStopped, BusError, NoSuchActor, NotBegun
from bus.tracing import trace

if TYPE_CHECKING:
    from actors.core.node import Node
    from actors.core.ref import Ref
    from actors.core.watching import DownKind

log = logging.getLogger(__name__)

HANDLERS_END_S = 5.0
"""How long cancelled handlers may take to end."""

ON_STOP_S = 30.0
"""How long ``on_stop`` may take."""


class Cell:
    """See the module docstring."""

    def __init__(
        self, node: Node, ref: Ref, factory: Callable[[], Actor], *, bound: int, restarts: Restarts, supervised: bool
    ) -> None:
        """``supervised``: an end for good is its supervisor's business, not that of the node's owner."""
        self.ref = ref
        self.supervised = supervised
        self.actor = factory()
        self.handlers = self.actor.handlers()
        self.metrics = Metrics()
        self._node = node
        self._now = node.loop.time
        self._factory = factory
        self._budget = Budget(restarts)
        self._holdings = Holdings(node, self)
        self._mailbox = Mailbox(str(ref), bound)
        self._turn = asyncio.Lock()  # held by whoever runs a handler that is not concurrent, or a hook
        self._claims = 0  # of others who wait for it
        self._tasks: set[asyncio.Task[None]] = set()
        self._main: asyncio.Task[None] | None = None
        self._refusal = ""  # of what comes
        self._over = False  # nothing more is taken either
        self._end_of: tuple[DownKind, str] = ("stopped", "it was stopped")
        self._stopping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Run ``on_start``, then take messages. Raises what ``on_start`` raises; what came meanwhile is refused."""
        self._adopt(self.actor)
        try:
            await self.actor.on_start()
        except BaseException as error:
            self._refuse(f"did not start: {error!r}")
            self._end_of = ("failed", f"it did not start: {error!r}")
            await self._hook("on_stop", self.actor.on_stop())
            self._ended()
            raise
        self.begin()

    def begin(self) -> None:
        """Take messages."""
        self._main = asyncio.create_task(self._run(), name=str(self.ref))

    def _adopt(self, actor: Actor) -> None:
        actor.node = self._node
        actor.ref = self.ref
        actor._holdings = self._holdings
        self.handlers = actor.handlers()

    def offer(self, envelope: Envelope, *, at_once: bool = False) -> None:
        """Queue a message. Raises ``Overloaded`` or, once stopped, ``NoSuchActor``. ``at_once``: an idle actor begins
        with it within this call, if no task runs."""
        if self._refusal:
            raise NotBegun(f"{self.ref} {self._refusal}")
        if self.metrics.handling is not None:
            self._check_slow()
        self._mailbox.put(envelope, urgent=envelope.facts.urgent, at_once=at_once)

    def _check_slow(self) -> None:
        """Somebody waits behind a handler."""
        metrics, now = self.metrics, self._now()
        if metrics.handling is not None and now - metrics.since > SLOW_S:
            metrics.warn(str(self.ref), metrics.handling.method, now - metrics.since, now, len(self._mailbox))

    def notice(self, envelope: Envelope) -> None:
        """Queue what this actor asked to be told, however full its mailbox is."""
        if not self._over:
            self._mailbox.notice(envelope)

    # ---- messages ------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        acting.set(str(self.ref))
        metrics = self.metrics
        while not self._over:
            await self._mailbox.filled()
            await self._turn.acquire()  # by hand: twice the coroutines of "async with" would cost more than the rest
            try:
                # One turn for all that waits, unless somebody else wants it.
                while not self._claims and not self._over and (envelope := self._mailbox.take()) is not None:
                    envelope.taken()
                    if envelope.cancelled:
                        metrics.cancelled += 1
                        continue
                    metrics.lanes[envelope.lane] += 1
                    if envelope.facts.concurrent:
                        self._beside(self.actor, envelope)
                        continue
                    actor = self.actor
                    metrics.handling, metrics.since = envelope.facts, self._now()
                    error = await self._handle(actor, envelope, self._main, metrics.since)
                    metrics.handling = None
                    if error is not None:
                        await self._supervise(actor, error)
            finally:
                self._turn.release()

    @asynccontextmanager
    async def _claimed(self) -> AsyncIterator[None]:
        """The actor's turn, for whoever is not its main task: before the next message is handled."""
        self._claims += 1
        try:
            await self._turn.acquire()
        finally:
            self._claims -= 1
        try:
            yield
        finally:
            self._turn.release()

    def _beside(self, actor: Actor, envelope: Envelope) -> None:
        """Run a concurrent handler in a task of its own."""
        began = False

        async def handle() -> None:
            nonlocal began
            began = True
            error = await self._handle(actor, envelope, task, self._now())
            if error is not None:
                async with self._claimed():
                    await self._supervise(actor, error)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not began:  # ended before its first step
                envelope.fail(self._stopped_in(envelope))

        task = asyncio.create_task(handle(), name=f"{self.ref} {envelope.facts.method}")
        self._tasks.add(task)
        task.add_done_callback(ended)

    async def _handle(
        self, actor: Actor, envelope: Envelope, task: asyncio.Task[None] | None, began: float
    ) -> Exception | None:
        """Run a handler, in this task, and answer with what comes of it; the failure of a tell is returned."""
        method = getattr(actor, envelope.facts.method)
        trace.set(envelope.trace)
        if envelope.cancelled:  # before its own task's first step
            self.metrics.cancelled += 1
            return None
        envelope.task = task
        try:
            if envelope.facts.streams:
                await envelope.feed(method(envelope.message))
            else:
                envelope.reply(await method(envelope.message))
        except asyncio.CancelledError:
            if envelope.cancelled and task is not None and task.cancelling() == 1:  # by its asker, and by nobody else
                self.metrics.cancelled += 1
                return None
            if not _is_cancelled():
                return self._failed(envelope, RuntimeError("it waited for something that was cancelled"))
            envelope.fail(self._stopped_in(envelope))
            raise
        except Exception as error:  # whatever user code raises ends here: with the asker, or with supervision
            return self._failed(envelope, error)
        finally:
            took_s = self._now() - began
            self.metrics.latency[bisect_left(BOUNDS_S, took_s)] += 1
            self.metrics.took_s += took_s
            if took_s > SLOW_S:
                self._check_slow()
            envelope.task = None
            if envelope.cancelled and task is not None:
                task.uncancel()
        return None

    def _failed(self, envelope: Envelope, error: Exception) -> Exception | None:
        self.metrics.failures += 1
        if not envelope.wants_answer:
            log.error("%s: %s failed", self.ref, envelope.facts.method, exc_info=error)
            return error
        if not isinstance(error, BusError):
            log.warning("%s: %s raised %r", self.ref, envelope.facts.method, error)
        if isinstance(error, NotBegun):  # something further on was not begun; this was
            error = NoSuchActor(str(error))
        envelope.fail(error)
        return None

    def _stopped_in(self, envelope: Envelope) -> ActorStopped:
        return ActorStopped(f"{self.ref} stopped while it handled {envelope.facts.message.__name__}")

    def describe(self) -> ActorDescription:
        metrics = self.metrics
        return ActorDescription(
            kind=type(self.actor).__name__,
            queued=len(self._mailbox),
            handled=sum(metrics.lanes),
            lanes=dict(zip(LANES, metrics.lanes, strict=True)),
            latency=list(metrics.latency),
            failures=metrics.failures,
            cancelled=metrics.cancelled,
            dead_letters=metrics.dead_letters,
            handling=metrics.handling.method if metrics.handling else "",
            handling_s=self._now() - metrics.since if metrics.handling else 0.0,
            took_s=metrics.took_s,
        )

    # ---- failures ------------------------------------------------------------------------------------------------

    async def _supervise(self, actor: Actor, error: Exception) -> None:
        """Restart the actor after a failure, or give it up. Runs in the actor's turn."""
        while actor is self.actor and not self._over:  # else it has been restarted or stopped already
            await self._hook("on_failure", actor.on_failure(error))
            wait_s = self._budget.spend(asyncio.get_running_loop().time())
            if wait_s is None:
                self._refuse(f"failed too often, last with {error!r}")
                self._end_of = ("failed", f"it failed too often, last with {error!r}")
                self._node.give_up(self, error)
                return
            self._holdings.renew()
            await self._end(self._tasks)
            await self._hook("on_stop", actor.on_stop())
            if wait_s:
                await asyncio.sleep(wait_s)
            try:
                actor = self._factory()
                self._adopt(actor)
                self.actor = actor
                await actor.on_start()
                return
            except Exception as again:  # also user code: another failure
                log.error("%s: restarting it failed", self.ref, exc_info=again)
                self.metrics.failures += 1
                error = again

    async def _hook(self, name: str, work: Awaitable[None]) -> None:
        """Run a hook that must not keep anything from going on."""
        try:
            async with asyncio.timeout(ON_STOP_S):
                await work
        except Exception as error:  # user code again, while worse is already being dealt with
            log.error("%s: %s failed", self.ref, name, exc_info=error)

    # ---- the end -------------------------------------------------------------------------------------------------

    async def drain(self, within_s: float) -> int:
        """Take no new messages, let everything end that was accepted, then stop. Returns how many messages the time was
        too short for: those are refused, or their handlers are cancelled."""
        self._refusal = self._refusal or "takes no more messages: it is draining"
        self._holdings.stop_timers()
        try:
            async with asyncio.timeout(within_s):
                while self._mailbox or self._turn.locked() or self._tasks:
                    async with self._claimed():
                        pass
                    if self._tasks:
                        await asyncio.wait(set(self._tasks))
                    await asyncio.sleep(0)
        except TimeoutError:
            log.warning("%s: not drained within %g s", self.ref, within_s)
        left = len(self._mailbox) + len(self._tasks) + self._turn.locked()
        await self.stop()
        return left

    async def stop(self, linked: str = "") -> None:
        """Take no more messages, end the running handlers, run ``on_stop``; what waits is refused. An actor must not
        await its own end. ``linked``: what it was linked to has ended, and how."""
        if self._stopping is None:
            if linked and not self._over:
                self._end_of = ("linked", linked)
            self._refuse("has stopped")
            self._stopping = asyncio.create_task(self._stop(), name=f"{self.ref} stops")
        await asyncio.shield(self._stopping)

    def _refuse(self, why: str) -> None:
        """From now on, and for what waits."""
        if not self._over:
            self._over, self._refusal = True, why
        for envelope in self._mailbox.drain():
            envelope.fail(NotBegun(f"{self.ref} {self._refusal}"))

    async def _stop(self) -> None:
        await self._end({task for task in (self._main, *self._tasks) if task is not None})
        await self._hook("on_stop", self.actor.on_stop())
        self._ended()

    def _ended(self) -> None:
        """Those who watch hear of it before this actor lets go of those it watches: a link must not be undone first."""
        self._node.ended(self, *self._end_of)
        self._holdings.end()

    async def _end(self, running: set[asyncio.Task[None]]) -> None:
        """Cancel handlers and see them end."""
        tasks = {task for task in running if task is not asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=HANDLERS_END_S)
            for task in stuck:
                log.error("%s: %s does not end", self.ref, task.get_name())


def _is_cancelled() -> bool:
    """Whether somebody cancels this task, rather than what it waited for having been cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
