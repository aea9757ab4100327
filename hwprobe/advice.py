"""Advice on the mapping from a language model: asked in words, read strictly, checked before use.

Invariant: nothing that a model says takes effect unless it is exactly one JSON object of the expected form, names every
task and only classes that serve, and the cost model expects of it at most ``WORSE`` less than of the learned mapping;
as soon as it expects less, the advice is withdrawn. Whatever becomes of an answer is kept with its reason (``log``),
and while one is waited for, the last one or the learned mapping decides. An answer that takes longer than
``ask_timeout_s`` is given up. An answer::

    {"shares": {"games": {"H800": 1.0}, "math": {"H20": 0.75, "H800": 0.25}}, "why": "..."}
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from hwprobe.costmodel import CostModel
from hwprobe.flow import Network
from hwprobe.mapping import Divided, Learned, Proposal, View, cleaned, difference, holding, network_of, why_not

WORSE = 0.02
"""What a model, or a person, knows beyond the figures may be worth that much."""
ASK_EVERY = 60
"""Decisions between an answer and the next question."""
ASK_TIMEOUT_S = 60.0
KEPT = 50
"""Answers that are remembered, and of each so many characters."""
SHOWN = 300
Ask = Callable[[str], Awaitable[str]]
"""Text to text: whatever serves a language model."""


class Advice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an answer must be."""

    shares: Divided
    why: str = ""


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one answer."""

    outcome: str  # taken, known, withdrawn, refused, failed
    reason: str
    answer: str = ""  # its beginning
    expected: float = 0.0  # trajectories a second
    learned: float = 0.0  # likewise, of what would be taken without


class AdviceRefused(ValueError):
    """An answer that cannot be used; one line."""


class Advisor:
    """A mapping (``mapping.TaskMapping``); see the module docstring. ``ask`` may raise ``OSError``, ``ValueError`` or
    ``RuntimeError`` (which the bus's errors are)."""

    def __init__(self, ask: Ask, *, every: int = ASK_EVERY, ask_timeout_s: float = ASK_TIMEOUT_S) -> None:
        self._ask = ask
        self._every = every
        self._ask_timeout_s = ask_timeout_s
        self._learned = Learned()
        self._until = 0  # decisions before the next question
        self._asking: asyncio.Task[str] | None = None
        self._taken: Advice | None = None
        self.log: deque[Heard] = deque(maxlen=KEPT)

    async def propose(self, model: CostModel, view: View) -> Proposal:
        learned = self._learned.decide(model, view)
        network = network_of(model, view)
        if network is None:
            return learned
        if self._asking is not None and self._asking.done():
            self._hear(self._asking, network, learned)
            self._asking, self._until = None, self._every
        if self._asking is None and self._until == 0:
            self._asking = asyncio.create_task(self._answer(question(model, network, view)))
        self._until = max(0, self._until - 1)
        return self._standing(network, view, learned)

    async def _answer(self, text: str) -> str:
        async with asyncio.timeout(self._ask_timeout_s):
            return await self._ask(text)

    def _hear(self, asked: asyncio.Task[str], network: Network, learned: Proposal) -> None:
        try:
            text = asked.result()
        except TimeoutError:
            self.log.append(Heard(outcome="failed", reason=f"no answer within {self._ask_timeout_s:g} s"))
            return
        except (OSError, ValueError, RuntimeError) as error:
            self.log.append(Heard(outcome="failed", reason=f"{type(error).__name__}: {error}"))
            return
        expected = 0.0
        try:
            advice = read(text)
            expected = _checked(advice, network, learned)
        except AdviceRefused as refused:
            outcome, reason = "refused", str(refused)
        else:
            known = self._taken is not None and difference(self._taken.shares, advice.shares) == 0
            outcome, reason = "known" if known else "taken", advice.why
            self._taken = advice
        self.log.append(
            Heard(outcome=outcome, reason=reason, answer=text[:SHOWN], expected=expected, learned=learned.expected)
        )

    def _standing(self, network: Network, view: View, learned: Proposal) -> Proposal:
        """The advice that was taken, as long as it is good."""
        if self._taken is None:
            return learned
        try:
            expected = _checked(self._taken, network, learned)
        except AdviceRefused as refused:
            self._taken = None
            self.log.append(Heard(outcome="withdrawn", reason=str(refused), learned=learned.expected))
            return learned
        figures = f"{expected:.3g} trajectories/s by the cost model, {learned.expected:.3g} of the learned one"
        why = f"{self._taken.why[:SHOWN]} ({figures})"
        return Proposal(
            shares=_complete(self._taken.shares, network),
            by="advised",
            expected=expected,
            before=network.rate(holding(view, network)),
            why=why,
        )


def read(text: str) -> Advice:
    """Exactly one JSON object. Raises ``AdviceRefused``."""
    try:
        return msgspec.json.decode(text.strip().encode(), type=Advice)
    except (msgspec.MsgspecError, UnicodeEncodeError) as error:
        raise AdviceRefused(f"expected one JSON object with shares and why, found {text[:60]!r}: {error}") from None


def _checked(advice: Advice, network: Network, learned: Proposal) -> float:
    """What the cost model expects of it. Raises ``AdviceRefused``."""
    wrong = why_not(advice.shares, network)
    if wrong:
        raise AdviceRefused(wrong)
    expected = network.rate(_complete(advice.shares, network))
    if expected < (1 - WORSE) * learned.expected:
        raise AdviceRefused(
            f"the cost model expects {expected:.3g} trajectories/s of it, and {learned.expected:.3g} of the learned one"
        )
    return expected


def _complete(shares: Divided, network: Network) -> Divided:
    """With a share of every class, if only 0."""
    return cleaned({task: {name: of.get(name, 0.0) for name in network.pools} for task, of in shares.items()})


def question(model: CostModel, network: Network, view: View) -> str:
    """All that the cost model knows, and what an answer has to look like."""
    engines = sum(pool.engines for pool in network.pools.values())
    batch = max(1.0, network.in_flight / engines)
    known = {
        "classes": {name: {"engines": pool.engines, "places": pool.ceiling} for name, pool in network.pools.items()},
        "tasks": {
            task: {
                "share_of_trajectories": round(shape.weight / sum(s.weight for s in network.tasks.values()), 3),
                "turns": round(shape.turns, 1),
                "prefill_tokens": round(shape.prefill_tokens),
                "decode_tokens": round(shape.decode_tokens),
                "engine_seconds": {
                    name: _figures(model, task, name, min(batch, pool.ceiling)) for name, pool in network.pools.items()
                },
            }
            for task, shape in network.tasks.items()
        },
        "trajectories_at_once": view.in_flight,
        "now": holding(view, network),
        "trajectories_per_s_now": float(f"{network.rate(holding(view, network)):.4g}"),
    }
    return (
        "Divide tasks between hardware classes so that as many trajectories a second are played as possible. Prefill is"
        " bound by compute, decoding by memory bandwidth; no class should wait while another is full.\n"
        f"{json.dumps(known)}\n"
        "Answer with one JSON object and nothing else, of this form, with every task and shares that add up to 1:"
        ' {"shares": {"TASK": {"CLASS": 1.0}}, "why": "one sentence"}\n'
    )


def _figures(model: CostModel, task: str, hardware_class: str, batch: float) -> dict[str, float]:
    cost = model.seconds(task, hardware_class, batch=batch)
    return {"prefill": float(f"{cost.prefill_s:.3g}"), "decode": float(f"{cost.decode_s:.3g}")}
