"""An env host's requests to the engines, by way of the proxy that a trajectory is with.

    generate --Add--> proxy --> engine --Finished--> a completion
        ^               |
        +-- it is gone, or serves no more: the same Add, behind the tokens that it has told of, to another one or
            its successor

Invariant: every request ends, by its deadline, in one completion or in a loss with a name. What a proxy that is gone
had not answered is asked of another one, where its time begins anew; the tokens are kept that it has told of while it
had the request (``actors.proxy.kept``).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import msgspec

from actors.core import Ref
from actors.env.episode import Episode, Lost
from actors.env.framing import Framing
from actors.env.peers import Hands, Peers
from actors.proxy.engines.protocol import Completion, GenerateRequest
from actors.proxy.kept import Kept
from actors.proxy.messages import Abort, Add, KeptSoFar, ProxySet
from actors.settings import RolloutSettings
from actors.weightsync.messages import PUBLISH_TIMEOUT_S
from bus.message import BusError, DeadlineExceeded

COMMAND_TIMEOUT_S = 10.0
NOTHING_YET = -1
"""Under which no engine of a proxy's successor has sampled."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a turn may want of its engine; see ``GenerateRequest``."""

    max_tokens: int
    stop: tuple[str, ...] = ()
    logprobs: int = 0


class Generation:
    """See the module docstring. ``environment``: its name, by which requests are routed that are of no stream."""

    def __init__(
        self,
        hands: Hands,
        peers: Peers,
        rollout: RolloutSettings,
        *,
        environment: str,
        framing: Framing,
        counters: Counter[str],
    ) -> None:
        self._hands = hands
        self._peers = peers
        self._rollout = rollout
        self._environment = environment
        self._framing = framing
        self._counters = counters
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._added: dict[str, Add] = {}  # of these, what a proxy was asked
        self._at: dict[str, Ref] = {}  # and the proxy, once it has accepted
        self._kept = Kept(counters)
        self._aborted: set[str] = set()
        self._moving: dict[str, asyncio.Task[None]] = {}  # and what asks another one, as that is gone
        self._deadlines: dict[str, asyncio.Timeout] = {}  # of those that a proxy has accepted
        self._sampled_under = 0  # the newest version that an answer of these proxies' engines was sampled under
        self._proxies = set(peers.proxies.refs)
        peers.proxies.on_follow(self._others)

    # ---- answers -------------------------------------------------------------------------------------------------

    def finished(self, completions: Sequence[Completion]) -> None:
        newest = max((int(each.versions.max(initial=0)) for each in completions), default=0)
        if newest > self._sampled_under:
            self._sampled_under = newest
            self._expect_soon()
        for completion in completions:
            future = self._waiting.pop(completion.request_id, None)
            if future is None or future.done():
                self._counters["late_completions"] += 1
            else:
                future.set_result(completion)

    def kept(self, message: KeptSoFar) -> None:
        """Only of the proxy that has a request now: what another one still says belongs to no answer that is waited
        for."""
        ids = (id_ for id_ in message.report.request_ids if self._at.get(id_) == message.proxy)
        self._kept.take(message.report, {id_: self._added[id_] for id_ in ids})

    def _along(self, request_id: str) -> Add:
        """What another proxy is asked instead, from now on."""
        add = self._added[request_id] = self._kept.along(self._added[request_id])
        return add

    def _expect_soon(self) -> None:
        """Engines serve under a version: what may be sampled under it waits for no other thing from now on."""
        soon = asyncio.get_running_loop().time() + self._rollout.turn_timeout_s
        for request_id, deadline in self._deadlines.items():
            when, waits = deadline.when(), self._added[request_id].request.from_version <= self._sampled_under
            if waits and when is not None and when > soon and not deadline.expired():
                deadline.reschedule(soon)

    def failed(self, request_id: str, loss: Lost) -> None:
        """It will not be answered."""
        future = self._waiting.pop(request_id, None)
        if future is not None and not future.done():
            future.set_exception(loss)

    # ---- requests ------------------------------------------------------------------------------------------------

    async def generate(
        self, episode: Episode, allowed: tuple[int, ...] | None, *, urgent: bool, wanted: Wanted | None = None
    ) -> Completion:
        """The next turn of a trajectory, of these tokens where there are any. ``wanted``: None is one of the allowed
        tokens, or as many as the job says. Raises ``Lost``, ``BusError``."""
        ticket, recorder = episode.ticket, episode.recorder
        if wanted is None:
            wanted = Wanted(max_tokens=1 if allowed is not None else self._rollout.max_tokens_per_turn)
        request = self._request(episode, allowed, wanted, urgent=urgent)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = future
        episode.interrupt = lambda: self._abort(request.request_id)
        try:
            task = ticket.stream or self._environment
            self._added[request.request_id] = Add(request, self._hands.ref, task, recorder.turns, keeps=True)
            while True:
                await self._add(self._along(request.request_id))
                waited_for, timeout_s = self._wait_for(request)
                try:
                    return await self._answer(request.request_id, future, timeout_s)
                except TimeoutError:
                    if not self._proxy_is_gone(request.request_id):
                        raise
                # Then the next ADD waits for another one, as long as that may take.
        except DeadlineExceeded as error:
            self._abort(request.request_id)
            raise Lost("proxy_timeout", str(error)) from None
        except TimeoutError:
            self._abort(request.request_id)
            raise Lost(
                "generation_timeout",
                f"trajectory {ticket.id} waited for {waited_for}, turn {recorder.turns}: no answer within "
                f"{timeout_s:g} s",
            ) from None
        finally:
            episode.interrupt = None
            self._waiting.pop(request.request_id, None)
            self._stop_moving(request.request_id)
            self._added.pop(request.request_id, None)
            self._at.pop(request.request_id, None)
            self._kept.forget(request.request_id)
            self._aborted.discard(request.request_id)

    def _request(
        self, episode: Episode, allowed: tuple[int, ...] | None, wanted: Wanted, *, urgent: bool
    ) -> GenerateRequest:
        ticket, recorder = episode.ticket, episode.recorder
        one_of_these = allowed is not None and wanted.max_tokens == 1
        return GenerateRequest(
            request_id=ticket.request(recorder.turns),
            trajectory=ticket.id,
            prompt=recorder.prompt(),
            max_tokens=wanted.max_tokens,
            temperature=ticket.temperature,
            allowed_token_ids=allowed,
            stop_token_ids=() if one_of_these else tuple(self._framing.tokenizer.eos_ids),
            seed=(ticket.seed + recorder.turns) & 0x7FFFFFFF,
            urgent=urgent,
            from_version=ticket.from_version,
            stop=wanted.stop,
            logprobs=wanted.logprobs,
        )

    async def _answer(self, request_id: str, future: asyncio.Future[Completion], timeout_s: float) -> Completion:
        """Raises ``TimeoutError``."""
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                self._deadlines[request_id] = deadline
                return await asyncio.shield(future)
        finally:
            del self._deadlines[request_id]

    def _proxy_is_gone(self, request_id: str) -> bool:
        """Whether the one that has a request is there no more, or was not."""
        proxy = self._at.get(request_id)
        return proxy is None or self._hands.node.is_gone(proxy.node)

    def _wait_for(self, request: GenerateRequest) -> tuple[str, float]:
        """What a turn waits for, by name, and how long: engines keep a first one until they have its version, which is
        on its way to them as long as nothing is known to have been sampled under it."""
        if request.from_version > self._sampled_under:
            what = f"version {request.from_version} to be published, and an engine"
            return what, PUBLISH_TIMEOUT_S + self._rollout.turn_timeout_s
        return "an engine", self._rollout.turn_timeout_s

    async def _add(self, add: Add) -> None:
        """Until a proxy has accepted it that is not gone by then, and has not stopped serving."""
        proxies, node = self._peers.proxies, self._hands.node
        while True:
            proxy = await proxies.add(node, add, timeout_s=COMMAND_TIMEOUT_S, retries=3)
            if proxies.has(proxy) and not proxies.stopped(proxy):
                self._at[add.request.request_id] = proxy
                if add.request.request_id in self._aborted:  # that ABORT may have overtaken the ADD
                    self._abort(add.request.request_id)
                return
            self._counters["requests_of_an_earlier_proxy"] += 1

    def _abort(self, request_id: str) -> None:
        """Wherever it is, or is asked for just now."""
        self._aborted.add(request_id)
        proxy, node = self._at.get(request_id), self._hands.node
        if proxy is not None:
            node.tell(proxy, Abort(request_id))
        else:
            self._peers.proxies.tell(node, self._added[request_id].request.trajectory, Abort(request_id))

    # ---- other proxies -------------------------------------------------------------------------------------------

    def _others(self, found: ProxySet) -> None:
        """A proxy that is gone has taken what it was asked along, and one that serves no more lets it wait while others
        serve. Where none is left that was there before, the engines begin without weights."""
        before, self._proxies = self._proxies, {member.ref for member in found.members}
        if before and not before & self._proxies:
            self._sampled_under = NOTHING_YET
        stopped = self._peers.proxies.stopped
        for request_id in [id_ for id_, proxy in self._at.items() if proxy not in self._proxies or stopped(proxy)]:
            del self._at[request_id]
            self._counters["requests_of_an_earlier_proxy"] += 1
            self._moving[request_id] = self._hands.node.background(self._add_elsewhere(self._along(request_id)))

    def _stop_moving(self, request_id: str) -> None:
        """It was answered meanwhile, by the one that is gone, or has ended: nobody else is to compute it."""
        moving = self._moving.pop(request_id, None)
        if moving is not None and not moving.done():
            moving.cancel()
            self._abort(request_id)

    async def _add_elsewhere(self, add: Add) -> None:
        try:
            await self._add(add)
        except BusError as error:
            future = self._waiting.get(add.request.request_id)
            if future is not None and not future.done():
                future.set_exception(Lost("proxy_timeout", str(error)))
            return
        deadline = self._deadlines.get(add.request.request_id)
        if deadline is not None and not deadline.expired():  # it begins anew there
            _, timeout_s = self._wait_for(add.request)
            deadline.reschedule(asyncio.get_running_loop().time() + timeout_s)
