"""One agent's session: what it asks the endpoint becomes the turns of one trajectory.

Invariant: turns are played one after another, and what is recorded is what an engine sampled. A session ends once, with
the agent's result or a loss; from then on nothing is recorded, and whoever asks is told how it ended.

A client that went away before its answer came, and asks the same again, gets that answer (clients repeat what a broken
connection cost them). One that asks while it still waits for an answer ends its session: two turns at once have no
order in which they could be trained on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import ParamSpec, Protocol, TypeVar

import msgspec
import numpy as np

from actors.env.agents.answers import BYTES_OF_ID, Turn
from actors.env.agents.asked import Chat, Refused, Sampling, Text
from actors.env.agents.conversation import FIRST, Continuation, Conversation, Message, Renderer
from actors.env.agents.tool_calls import Written, written
from actors.env.chat_template import TemplateRefusal
from actors.env.episode import Episode, Lost
from actors.env.generation import Wanted
from actors.proxy.engines.protocol import CUT, Completion, EngineRefusal, GenerateRequest
from actors.proxy.engines.validation import check_parameters
from bus.message import BusError

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

LARGE = 64 * 1024
"""Bytes of a body whose reading, rendering and tokenising, or making, would hold up the loop for long."""


async def beside_the_loop(size: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Do what takes time in proportion to ``size``: in a thread, where that is much."""
    if size < LARGE:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


class Generate(Protocol):
    """As ``actors.env.generation.Generation.generate``."""

    async def __call__(
        self, episode: Episode, allowed: tuple[int, ...] | None, *, urgent: bool, wanted: Wanted | None = None
    ) -> Completion: ...


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for all sessions."""

    model: str
    temperature: float
    max_turns: int
    max_tokens: int  # of a turn
    max_model_len: int
    vocabulary: int


class Asked:
    """A request that is being answered, or was answered last."""

    def __init__(self, body: bytes, task: asyncio.Task[Turn], waits: Callable[[], bool]) -> None:
        """``waits``: whether its client is still there."""
        self.body = body
        self.task = task
        self.waits = waits
        self.delivered = False


class Session:
    """See the module docstring."""

    def __init__(
        self,
        episode: Episode,
        renderer: Renderer,
        rules: Rules,
        *,
        generate: Generate,
        check: Callable[[Episode], None],
        urgent: bool,
        counters: Counter[str],
    ) -> None:
        """``check`` raises ``Lost`` where the trajectory can no longer be trained on."""
        self.episode = episode
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.cut = ""  # why the agent was refused further turns, if it was
        self.ended = ""  # how
        self._renderer = renderer
        self._rules = rules
        self._generate = generate
        self._check = check
        self._urgent = urgent
        self._counters = counters
        self._conversation = Conversation(renderer)
        self._text: str | None = None  # of a completion so far, where it may go on
        self._asked: Asked | None = None
        episode.interrupt = self._interrupted

    @property
    def busy(self) -> bool:
        """Whether a turn is being played."""
        return self._asked is not None and not self._asked.task.done()

    # ---- its end -------------------------------------------------------------------------------------------------

    def lose(self, loss: Lost) -> None:
        """It ends here; whoever waits for ``over`` gets the loss. The first one counts."""
        if not self.over.done():
            self.over.set_exception(loss)
            self.over.exception()  # seen: whoever waits gets it, and nobody has to

    def close(self, how: str) -> None:
        """Nothing is played or recorded from now on. Idempotent."""
        self.ended = self.ended or how
        if self._asked is not None and self.busy:
            if self.episode.interrupt is not None:
                self.episode.interrupt()  # an engine need not go on
            self._asked.task.cancel()
        self.episode.interrupt = None

    def _interrupted(self) -> None:
        self.lose(Lost(self.episode.stop_reason or "aborted"))

    # ---- requests ------------------------------------------------------------------------------------------------

    async def ask(self, body: bytes, request: Chat | Text, waits: Callable[[], bool]) -> Asked:
        """Answer a request; its turn is done when this returns. Raises ``Refused``."""
        asked = await self._again(body, waits)
        if asked is None:
            self._raise_if_ended()
            task = asyncio.create_task(
                self._play(request, len(body)), name=f"turn of trajectory {self.episode.ticket.id}"
            )
            asked = self._asked = Asked(body, task, waits)
        await asyncio.wait([asked.task])
        if asked.task.cancelled():
            self._raise_if_ended()
            raise self._over("it was cut off")
        asked.task.result()
        return asked

    async def _again(self, body: bytes, waits: Callable[[], bool]) -> Asked | None:
        """The request before, if this is the same once more."""
        while True:
            self._raise_if_ended()
            last = self._asked
            if last is None or last.delivered:
                return None
            if last.waits() and not last.task.done():
                self._counters["agents_overlapped"] += 1
                self.lose(Lost("agent_overlapped", f"{self._who()} asked for a turn while another one was played"))
                raise self._over("agent_overlapped")
            if last.body == body and not (last.task.done() and (last.task.cancelled() or last.task.exception())):
                last.waits = waits
                self._counters["agents_repeated"] += 1
                return last
            if last.task.done():
                return None
            await asyncio.wait([last.task])  # nobody waits for it any more, but it will be recorded

    def _raise_if_ended(self) -> None:
        if self.ended:
            raise self._over(self.ended)
        if self.over.done() and (loss := self.over.exception()) is not None:
            raise self._over(str(loss))

    def over_by(self, how: str) -> str:
        """What whoever asks then is told."""
        return f"the session of {self._who()} has ended: {how}"

    def _over(self, how: str) -> Refused:
        return session_ended(self.over_by(how))

    def _who(self) -> str:
        return f"trajectory {self.episode.ticket.id}, turn {self.episode.recorder.turns}"

    # ---- a turn --------------------------------------------------------------------------------------------------

    async def _play(self, request: Chat | Text, size: int) -> Turn:
        """Raises ``Refused``; what costs the trajectory ends the session before."""
        try:
            self._check(self.episode)
            return await self._turn(request, size)
        except Lost as loss:
            self.lose(loss)
        except BusError as error:
            self.lose(Lost("infrastructure", str(error)))
        except Refused:
            raise
        except Exception as error:  # a fault of ours must cost one trajectory, and say so
            log.exception("%s failed", self._who(), extra={"trajectory": self.episode.ticket.id})
            self.lose(Lost("internal_error", repr(error)))
        self._raise_if_ended()
        raise self._over("it was lost")  # ``lose`` has said how

    async def _turn(self, request: Chat | Text, size: int) -> Turn:
        rules, episode, recorder = self._rules, self.episode, self.episode.recorder
        asked = request.sampling
        self._check_asked(asked)
        if recorder.turns >= rules.max_turns:
            raise self._cut("turn_limit", f"{rules.max_turns} turns were played (environment.max_turns)")
        planned = await beside_the_loop(size, self._plan, request)
        room = rules.max_model_len - len(planned.tokens) - (0 if planned.new_segment else len(recorder))
        if room < 1:
            total = rules.max_model_len - room
            what = f"the prompt has {total} tokens; with one more, {rules.max_model_len} (rollout.max_model_len) would "
            raise self._cut("context_length_exceeded", what + "be exceeded")
        limit = min(asked.max_tokens or rules.max_tokens, rules.max_tokens, room)
        wanted = Wanted(max_tokens=limit, stop=asked.stop, logprobs=asked.alternatives)
        self._check_wanted(wanted)
        self._record(planned)
        prompt = recorder.prompt()
        episode.state = "engine"
        try:
            completion = await self._generate(episode, asked.allowed, urgent=self._urgent, wanted=wanted)
        finally:
            episode.interrupt = self._interrupted
        if completion.finish_reason in CUT:
            raise Lost(episode.stop_reason or completion.finish_reason, "cut while it generated")
        text, told = await beside_the_loop(BYTES_OF_ID * len(completion.tokens), self._read, request, completion)
        turn = Turn(
            id=f"{'chatcmpl' if isinstance(request, Chat) else 'cmpl'}-{episode.ticket.request(recorder.turns)}",
            created=int(time.time()),
            model=rules.model,
            prompt=prompt,
            tokens=completion.tokens,
            logprobs=completion.logprobs,
            alternatives=completion.alternatives,
            written=told,
            stopped=completion.finish_reason == "stop",
        )
        recorder.sampled(completion.tokens, completion.logprobs, completion.versions, asked.allowed, text)
        episode.took(completion.tokens)
        episode.state = "environment"
        self._remember(request, turn, text)
        return turn

    def _check_asked(self, sampling: Sampling) -> None:
        rules = self._rules
        if sampling.temperature not in (None, rules.temperature):
            raise Refused(
                400,
                f"temperature: the run samples at {rules.temperature:g} (rollout.temperature), found "
                f"{sampling.temperature:g}; leave it out, or let the job ignore it (environment.agent.ignore: "
                "[temperature])",
                code="unsupported_value",
                param="temperature",
            )
        if sampling.allowed is not None and not 0 <= sampling.allowed[0] <= sampling.allowed[-1] < rules.vocabulary:
            what = f"allowed_token_ids: expected token ids from 0 to {rules.vocabulary - 1}"
            raise Refused(400, what, code="invalid_value", param="allowed_token_ids")

    def _check_wanted(self, wanted: Wanted) -> None:
        """Before anything is recorded, in the words of the engines."""
        ticket, anything = self.episode.ticket, np.zeros(1, np.int32)
        request = GenerateRequest(
            ticket.id, ticket.id, anything, wanted.max_tokens, stop=wanted.stop, logprobs=wanted.logprobs
        )
        try:
            check_parameters(request)
        except EngineRefusal as refusal:
            raise Refused(400, str(refusal), code="invalid_value") from None

    def _cut(self, code: str, what: str) -> Refused:
        """The session goes on without further turns: the agent may still say how it went."""
        self.cut = code
        self._counters[f"agents_cut_{code}"] += 1
        return Refused(400, f"{self._who()}: {what}", code=code)

    def _plan(self, request: Chat | Text) -> Continuation:
        if isinstance(request, Text):
            return self._plan_text(request.prompt)
        try:
            return self._conversation.plan(request.messages, request.tools)
        except TemplateRefusal as error:
            raise Refused(400, str(error), code="unsupported_value", param="messages") from None
        except RecursionError:
            what = "messages: what is in them is nested too deeply"
            raise Refused(400, what, code="invalid_value", param="messages") from None

    def _plan_text(self, prompt: str | tuple[int, ...]) -> Continuation:
        """A completion's prompt: what was said before and more goes on behind it."""
        if isinstance(prompt, str):
            if self._text is not None and prompt.startswith(self._text):
                added = prompt[len(self._text) :]
                return Continuation(self._renderer.tokenizer.encode(added), "", added)
            return Continuation(self._renderer.tokenizer.encode(prompt), self._break(), prompt)
        if min(prompt) < 0 or max(prompt) >= self._rules.vocabulary:
            what = f"prompt: expected token ids from 0 to {self._rules.vocabulary - 1}"
            raise Refused(400, what, code="invalid_value", param="prompt")
        tokens = np.array(prompt, np.int32)
        known = len(self.episode.recorder)
        if 0 < known <= len(tokens) and np.array_equal(self.episode.recorder.prompt(), tokens[:known]):
            return Continuation(tokens[known:], "", self._renderer.tokenizer.decode(tokens[known:]))
        return Continuation(tokens, self._break(), self._renderer.tokenizer.decode(tokens))

    def _break(self) -> str:
        return "prompt changed" if len(self.episode.recorder) else FIRST

    def _record(self, planned: Continuation) -> None:
        recorder = self.episode.recorder
        if not planned.new_segment:
            recorder.observed(planned.tokens, planned.text)
            return
        if planned.new_segment != FIRST:
            self._counters[f"agents_new_segment_{planned.new_segment.replace(' ', '_')}"] += 1
        recorder.start(planned.tokens, planned.text)

    def _read(self, request: Chat | Text, completion: Completion) -> tuple[str, Written]:
        """What was sampled as a text, and what of it the agent is told."""
        text = self._renderer.tokenizer.decode(completion.tokens)
        told = before(text, request.sampling.stop)
        if isinstance(request, Text) or not request.calls:
            return text, Written(told)
        return text, written(told, request.tools, self._renderer.tool_calls, self.episode.recorder.turns)

    def _remember(self, request: Chat | Text, turn: Turn, text: str) -> None:
        if isinstance(request, Chat):
            answer = Message("assistant", turn.written.content, turn.written.calls)
            self._conversation.answered(request.messages, request.tools, answer, turn.tokens)
            self._text = None
            return
        self._conversation = Conversation(self._renderer)  # a chat that follows has nothing to go on from
        ended = int(turn.tokens[-1]) in self._renderer.tokenizer.eos_ids
        self._text = request.prompt + text if isinstance(request.prompt, str) and not ended else None


def session_ended(what: str) -> Refused:
    return Refused(410, what, code="session_ended")


def before(text: str, stops: Sequence[str]) -> str:
    """What an agent is told of a text that ends with a stop: nothing of it, as in OpenAI's API. It is recorded."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
