"""The embedded engine: continuous batching of a transformers causal language model in this process.

Invariant: what a row's slot holds was computed with the weights now in use; loading weights empties every slot, and
a row is sampled only when all of its tokens are in its slot.

A step takes the new tokens of every running row (a whole prompt, what a turn added to a known prefix, or the one
token sampled last), packs them end to end and runs one forward pass; the language-model head sees only each row's
last token. A trajectory's slot is kept between its turns, so that a turn costs what it added. What several rows begin
with (the prompt of a group's members) is computed once: the others wait for it and copy its keys and values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from actors.proxy.engines.protocol import (
    Begun,
    Completion,
    EngineLimits,
    EngineRefusal,
    FinishReason,
    GenerateRequest,
    nothing_sampled,
)
from actors.proxy.engines.sampled import Ranked, Sampled, Texts
from actors.proxy.engines.torch_attention import IMPLEMENTATION, KvStore, RowWork, StepPlan, kv_bytes_per_token
from actors.proxy.engines.torch_decoder import forward_of
from actors.proxy.engines.torch_sampling import Draws, RowSampling, Sampler
from actors.proxy.engines.torch_slots import SlotTable
from actors.proxy.engines.torch_weights import gather, policy_dtype, tensor_digest
from actors.proxy.engines.validation import check, check_score
from actors.proxy.engines.work import WorkMeter

SHARED_TOKENS = 8
"""Tokens that must be saved for a row to copy what another slot holds, or to wait a step for what one is computing."""

STEP_TOKENS = 2048
"""New tokens of one forward pass; longer prompts are taken in pieces, oldest request first."""


@dataclass
class _Row:
    """A request that has a slot."""

    request: GenerateRequest
    seed: int
    slot: int
    cached: int  # tokens in the slot
    tokens: np.ndarray  # int32 [P + max_tokens], filled up to ``length``
    length: int
    sampled: Sampled
    alone: bool = False  # has looked for others that begin like it, and computes what is left by itself


@dataclass
class _Decoding:
    """Every running row in its last step, where each had one token: the next step is the same, one token further."""

    rows: list[_Row]  # as in the plan
    plan: StepPlan
    draws: Draws
    every: torch.Tensor  # int64 [B]; the rows' places


class TorchEngine:
    """See the module docstring; ``actors.proxy.engines.protocol.Engine`` for the methods.

    ``kv_cache_bytes`` bounds the memory of the slots; by default there are twice as many as ``max_sequences``, so
    that trajectories keep theirs while their environments work. Where fewer than ``max_sequences`` fit, ``limits``
    says how many do. ``seed`` draws for requests that bring none. ``texts`` reads tokens, for stop strings.
    """

    def __init__(
        self,
        policy_dir: Path,
        *,
        max_sequences: int,
        max_model_len: int,
        seed: int = 0,
        dtype: str | None = None,
        kv_cache_bytes: int | None = None,
        texts: Texts | None = None,
        device: str | None = None,
    ) -> None:
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        config = AutoConfig.from_pretrained(policy_dir, local_files_only=True)
        precision = getattr(torch, dtype or policy_dtype(policy_dir))
        model = AutoModelForCausalLM.from_config(config, dtype=precision, attn_implementation=IMPLEMENTATION)
        model = model.to(self._device).eval().requires_grad_(False)
        self._run = forward_of(model, max_model_len)
        self._parameters = dict(model.named_parameters())
        slot_bytes = max_model_len * kv_bytes_per_token(config, precision)
        slots = 2 * max_sequences
        if kv_cache_bytes is not None:
            slots = min(slots, kv_cache_bytes // slot_bytes - 1)  # one more is the scratch slot of ``score``
            if slots < 1:
                raise ValueError(
                    f"kv_cache_bytes={kv_cache_bytes} cannot hold two sequences of {max_model_len} tokens of this "
                    f"policy; {2 * slot_bytes} bytes is the least"
                )
        vocabulary = int(config.vocab_size)
        self.limits = EngineLimits(min(max_sequences, slots), max_model_len, vocabulary, texts is not None)
        self.work = WorkMeter()
        self._texts = texts
        self._store = KvStore(config, slots + 1, max_model_len, precision, self._device)
        self._scratch = slots
        self._slots = SlotTable(slots, max_model_len)
        self._sampler = Sampler(self._device)
        self._random = np.random.default_rng(seed)
        self._waiting: deque[tuple[GenerateRequest, int]] = deque()
        self._urgent: deque[tuple[GenerateRequest, int]] = deque()  # these go first
        self._running: dict[str, _Row] = {}
        self._decoding: _Decoding | None = None  # until a row joins or leaves
        self._ids: set[str] = set()
        self._version: int | None = None

    def add(self, request: GenerateRequest) -> None:
        check(request, self.limits)
        if request.request_id in self._ids:
            raise EngineRefusal(f"request {request.request_id}: one with this id is already here")
        seed = int(self._random.integers(2**63)) if request.seed is None else request.seed % 2**64
        self._ids.add(request.request_id)
        (self._urgent if request.urgent else self._waiting).append((request, seed))

    def abort(self, request_id: str) -> Completion | None:
        row = self._running.get(request_id)
        if row is not None:
            return self._finish(row, "aborted")
        for line in (self._urgent, self._waiting):
            for index, (request, _) in enumerate(line):
                if request.request_id == request_id:
                    del line[index]
                    self._ids.discard(request_id)
                    return nothing_sampled(request)
        return None

    def sampled(self, request_id: str, since: int) -> Begun | None:
        row = self._running.get(request_id)
        return None if row is None else row.sampled.since(since)

    def unfinished(self) -> int:
        return len(self._ids)

    def step(self) -> Sequence[Completion]:
        if self._version is None:
            return ()
        self._admit()
        if self._decoding is not None:
            finished = self._decode(self._decoding, self._version)
            if finished is not None:
                return finished
        rows, work = self._work()
        if not rows:
            return ()
        plan = StepPlan(work, self._store, self._device)
        ordered = [rows[index] for index in plan.order]
        complete = []
        for index, row in enumerate(ordered):
            added = len(work[plan.order[index]].tokens)
            row.cached += added
            if added == 1:
                self.work.decoded(1, row.cached)
            else:
                self.work.prefilled(added)
            if row.cached == row.length:
                complete.append(index)
        places = torch.from_numpy(plan.last[complete]).to(self._device)
        logits = self._forward(plan, places)
        for row, done in zip(rows, work, strict=True):
            self._slots.extend(row.slot, done.tokens)
        if not complete:
            return ()
        ordered = [ordered[index] for index in complete]
        draws = self._sampler.draws(
            [
                RowSampling(
                    row.request.temperature,
                    row.request.allowed_token_ids,
                    row.seed,
                    len(row.sampled),  # also of what it brought: the place in its stream of random numbers
                    row.request.logprobs,
                )
                for row in ordered
            ]
        )
        if len(complete) == len(self._running) == len(plan.tokens):
            self._decoding = _Decoding(ordered, plan, draws, places)
        return self._sample(ordered, draws(logits), self._version)

    def _decode(self, decoding: _Decoding, version: int) -> list[Completion] | None:
        """The last step again, one token further; None where that takes a plan of its own."""
        rows, plan = decoding.rows, decoding.plan
        tokens = np.array([row.tokens[row.cached] for row in rows], dtype=np.int32)
        if not plan.advance(tokens):
            self._decoding = None
            return None
        logits = self._forward(plan, decoding.every)
        self._slots.extend_each(plan.slots, tokens)
        context = 0
        for row in rows:
            row.cached += 1
            context += row.cached
        self.work.decoded(len(rows), context)
        return self._sample(rows, decoding.draws(logits), version)

    def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
        self._version = None
        digests = {}
        shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        for name, tensor in gather(version, tensors, shapes):
            self._parameters[name].copy_(tensor)
            digests[name] = tensor_digest(tensor)
        self._forget_all()
        self._version = version
        return digests

    def score(self, tokens: np.ndarray) -> np.ndarray:
        check_score(tokens, self.limits, self._version)
        tokens = tokens.astype(np.int32)
        parts = [np.empty(0, dtype=np.float32)]
        for start in range(0, len(tokens) - 1, STEP_TOKENS):
            end = min(start + STEP_TOKENS, len(tokens) - 1)
            plan = StepPlan([RowWork(self._scratch, start, tokens[start:end])], self._store, self._device)
            logprobs = self._forward(plan, torch.arange(end - start, device=self._device)).float().log_softmax(-1)
            following = torch.from_numpy(tokens[start + 1 : end + 1].astype(np.int64)).to(self._device)
            parts.append(logprobs.gather(1, following[:, None])[:, 0].cpu().numpy())
        return np.concatenate(parts)

    def forget(self, trajectory: str) -> None:
        self._slots.forget(trajectory)

    def close(self) -> None:
        self._version = None
        self._waiting.clear()
        self._urgent.clear()
        self._running.clear()
        self._decoding = None
        self._ids.clear()
        self._store.release()

    def _admit(self) -> None:
        while (line := self._urgent or self._waiting) and len(self._running) < self.limits.max_sequences:
            request, seed = line[0]
            known = request.prompt
            if request.begun is not None:
                known = np.concatenate([known, request.begun.tokens])
            place = self._slots.acquire(request.trajectory, known)
            if place is None:
                return
            line.popleft()
            self._decoding = None
            tokens = np.empty(len(request.prompt) + request.max_tokens, dtype=np.int32)
            tokens[: len(known)] = known
            sampled = Sampled(request, self._texts)
            self._running[request.request_id] = _Row(request, seed, place[0], place[1], tokens, len(known), sampled)

    def _work(self) -> tuple[list[_Row], list[RowWork]]:
        """What each row adds in this step, oldest request first, within ``STEP_TOKENS``."""
        budget = STEP_TOKENS
        rows: list[_Row] = []
        work: list[RowWork] = []
        for row in self._running.values():
            if not (row.alone or self._share(row, rows)):
                continue
            end = min(row.length, row.cached + budget)
            rows.append(row)
            work.append(RowWork(row.slot, row.cached, row.tokens[row.cached : end]))
            budget -= end - row.cached
            if not budget:
                break
        return rows, work

    def _share(self, row: _Row, computing: list[_Row]) -> bool:
        """Copy how a row begins from the slot that holds most of it. Returns False where a row of this step (always an
        older one) computes more of it: then it is worth the wait."""
        row.alone = True
        known = row.tokens[: row.length - 1]  # the last one's logits are wanted
        if len(known) < row.cached + SHARED_TOKENS:
            return True
        slot, held = self._slots.longest_prefix(known)
        held = max(held, row.cached)
        for other in computing:
            if other.length - other.cached > SHARED_TOKENS and _common(known, other) >= held + SHARED_TOKENS:
                row.alone = False
                return False
        if held >= row.cached + SHARED_TOKENS:
            self._store.copy(slot, row.slot, held)
            self._slots.copied(row.slot, known[:held])
            row.cached = held
        return True

    @torch.inference_mode()
    def _forward(self, plan: StepPlan, keep: torch.Tensor) -> torch.Tensor:
        """Logits [len(keep), V] at those packed places; fills the slots."""
        return self._run(plan, keep)

    def _sample(
        self, rows: list[_Row], drawn: tuple[np.ndarray, np.ndarray, dict[int, Ranked]], version: int
    ) -> list[Completion]:
        """Give each row its token, with its log-probability."""
        tokens, logprobs, ranked = drawn
        for place, of_it in ranked.items():
            rows[place].sampled.rank(of_it)
        finished = []
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.tokens[row.length] = token
            row.length += 1
            row.sampled.add(token, logprob, version)
            reason = row.sampled.end()
            if reason is not None:
                finished.append(self._finish(row, reason))
        return finished

    def _finish(self, row: _Row, reason: FinishReason) -> Completion:
        self._decoding = None
        del self._running[row.request.request_id]
        self._ids.discard(row.request.request_id)
        self._slots.release(row.slot, row.request.trajectory)
        return row.sampled.completion(reason)

    def _forget_all(self) -> None:
        self._decoding = None
        self._store.reset()
        self._slots.invalidate()
        for row in self._running.values():
            row.cached = 0
            row.alone = False


def _common(tokens: np.ndarray, row: _Row) -> int:
    """How many tokens both begin with."""
    count = min(len(tokens), row.length)
    different = np.flatnonzero(tokens[:count] != row.tokens[:count])
    return int(different[0]) if len(different) else count
