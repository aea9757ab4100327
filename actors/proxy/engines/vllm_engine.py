"""vLLM (V1, in this process) behind the engine protocol.

Invariant: the tokens of every unfinished request are held here, and vLLM holds only what can be added to it again.
New weights and scoring find vLLM empty: its requests are withdrawn first and come back, with the next step, as
prompt + tokens so far. So a token's version is the one that was loaded when vLLM returned it, and keys and values
of older weights cannot be read.

vLLM's core is driven directly (``LLMEngine.engine_core``): its front end parses, detokenises and keeps statistics
for every token, which costs more than the forward pass of a small policy.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.distributed import distributed_c10d

from actors.gpu_memory import given_share
from actors.proxy.engines.protocol import (
    Begun,
    Completion,
    EngineLimits,
    EngineRefusal,
    FinishReason,
    GenerateRequest,
    KvRole,
)
from actors.proxy.engines.sampled import Sampled, Texts
from actors.proxy.engines.seeds import derive
from actors.proxy.engines.torch_weights import gather, passed_on, policy_tensors
from actors.proxy.engines.validation import check, check_score
from actors.proxy.engines.vllm_environment import prepare
from actors.proxy.engines.work import WorkMeter

GPU = prepare()

from vllm import SamplingParams  # noqa: E402  (reads the environment)
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest  # noqa: E402
from vllm.v1.engine import FinishReason as VllmReason  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

from actors.proxy.engines.vllm_arguments import Setup, engine_arguments  # noqa: E402
from actors.proxy.engines.vllm_kv import use_weights  # noqa: E402

REASONS: dict[VllmReason, FinishReason] = {VllmReason.STOP: "stop", VllmReason.LENGTH: "length"}


@dataclass
class _Held:
    """An unfinished request."""

    request: GenerateRequest
    seed: int
    sampled: Sampled
    inside: str | None = None  # its name inside vLLM, new at every submission; None while withdrawn


def _remove_meeting_place() -> None:
    """vLLM's ranks (here one) meet over a file in the directory for temporary files, which nobody removes. Once they
    have met it is not needed. (With ``VLLM_ENABLE_V1_MULTIPROCESSING=1`` they meet elsewhere.)"""
    if not distributed_c10d.is_initialized():
        return
    store = distributed_c10d._get_default_store()  # what torch has no public way to
    while isinstance(store, distributed_c10d.PrefixStore):
        store = store.underlying_store
    path = getattr(store, "path", None)  # of a FileStore, which torch does not export
    if path is not None:
        Path(path).unlink(missing_ok=True)


class VllmEngine:
    """See the module docstring; ``actors.proxy.engines.protocol.Engine`` for the methods.

    ``kv_cache_bytes`` bounds the KV cache (by default: ``vllm_arguments``); requests that find no room wait. With
    ``tensor_parallel`` > 1 vLLM has a process for each device. ``cuda_graphs``: on a GPU. ``texts`` reads tokens, for
    stop strings: vLLM's own front end, which is not used, would do that with its tokenizer.
    ``kv_store``: a directory through which engines share prompts' keys and values, and what this one does with them
    (``actors.proxy.engines.vllm_kv``).
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
        tensor_parallel: int = 1,
        cuda_graphs: bool = True,
        texts: Texts | None = None,
        kv_store: tuple[Path, KvRole] | None = None,
    ) -> None:
        if kv_store is not None and tensor_parallel > 1:
            raise ValueError(f"prompts are shared between engines of one device, found {tensor_parallel} devices")
        limits = EngineLimits(max_sequences, max_model_len)
        if tensor_parallel > 1 and not GPU:  # otherwise vLLM wants a NUMA node for each of its processes
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        setup = Setup(
            policy_dir,
            limits,
            seed,
            dtype,
            kv_cache_bytes,
            tensor_parallel,
            cuda_graphs,
            kv_store,
            gpu_share=given_share(),
        )
        arguments = engine_arguments(setup, gpu=GPU)
        self._llm = LLMEngine.from_engine_args(arguments)
        _remove_meeting_place()
        # Reloading warns, at every version, about layers with nothing to load (rotary positions, a tied head). Said
        # here because vLLM resets the levels of its loggers when an engine starts.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        self._core = self._llm.engine_core
        self._alone = tensor_parallel == 1
        self._shares_prompts = kv_store is not None
        vocabulary = int(self._llm.model_config.get_vocab_size())
        self.limits = EngineLimits(max_sequences, max_model_len, vocabulary, texts is not None)
        self._texts = texts
        self._tensors = policy_tensors(policy_dir)
        self.work = WorkMeter()
        self._random = np.random.default_rng(seed)
        self._held: dict[str, _Held] = {}
        self._outside: dict[str, _Held] = {}
        self._inside: dict[str, _Held] = {}
        self._submissions = 0
        self._version: int | None = None
        self._open = True

    def add(self, request: GenerateRequest) -> None:
        check(request, self.limits)
        if request.request_id in self._held:
            raise EngineRefusal(f"request {request.request_id}: one with this id is already here")
        seed = int(self._random.integers(2**63)) if request.seed is None else request.seed
        held = _Held(request, seed, Sampled(request, self._texts))
        self._held[request.request_id] = held
        self._outside[request.request_id] = held

    def abort(self, request_id: str) -> Completion | None:
        held = self._held.pop(request_id, None)
        if held is None:
            return None
        self._outside.pop(request_id, None)
        if held.inside is not None:
            del self._inside[held.inside]
            self._core.abort_requests([held.inside])
        return held.sampled.completion("aborted")

    def sampled(self, request_id: str, since: int) -> Begun | None:
        held = self._held.get(request_id)
        return None if held is None else held.sampled.since(since)

    def unfinished(self) -> int:
        return len(self._held)

    def step(self) -> Sequence[Completion]:
        if self._version is None:
            return ()
        for withdrawn in self._outside.values():
            self._submit(withdrawn)
        self._outside.clear()
        if not self._inside:
            return ()
        finished = []
        for output in self._core.get_output().outputs:
            held = self._inside.get(output.request_id)
            if held is not None:
                self._take(held, output, self._version)
                reason = self._end(held, output)
                if reason is not None:
                    finished.append(self._finish(held, reason))
        return finished

    def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
        self._version = None
        self._withdraw()
        arrived = gather(version, tensors, self._tensors)
        digests = self._hand_over(version, arrived)
        if not self._core.reset_prefix_cache():
            raise RuntimeError(
                f"version {version}: vLLM would not drop its prefix cache because blocks are still in use, "
                f"though all {len(self._held)} requests were withdrawn; restart the engine"
            )
        if self._shares_prompts:
            use_weights(digests)
        self._version = version
        return digests

    def _hand_over(self, version: int, tensors: list[tuple[str, torch.Tensor]]) -> dict[str, str]:
        """To vLLM's workers; returns the digests that were taken there."""
        if self._alone:
            return next(iter(self._core.collective_rpc("take_weights", args=(tensors,))))
        with passed_on(tensors) as path:
            digests, *others = self._core.collective_rpc("take_weights_from", args=(str(path),))
        if any(other != digests for other in others):
            raise RuntimeError(f"version {version}: the engine's {len(others) + 1} workers loaded different tensors")
        return dict(digests)

    def score(self, tokens: np.ndarray) -> np.ndarray:
        check_score(tokens, self.limits, self._version)
        if len(tokens) == 1:
            return np.empty(0, dtype=np.float32)
        self._withdraw()
        # Asking for prompt log-probabilities makes vLLM compute the whole prompt and read no cached block.
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False)
        name = self._send(tokens.tolist(), params)
        for _ in range(len(tokens) + 1):  # each step computes at least one token
            for output in self._core.get_output().outputs:
                if output.request_id == name and output.new_prompt_logprobs_tensors is not None:
                    scores = output.new_prompt_logprobs_tensors.logprobs[:, 0].to(torch.float32)
                    return np.asarray(scores.cpu().numpy())
        raise RuntimeError(f"vLLM returned no prompt log-probabilities for {len(tokens)} tokens")

    def forget(self, trajectory: str) -> None:
        """Nothing to do: vLLM's blocks belong to prefixes, and the least recently used give way."""

    def close(self) -> None:
        if self._open:
            self._open = False
            self._version = None
            self._held.clear()
            self._outside.clear()
            self._inside.clear()
            self._core.shutdown()

    def _submit(self, held: _Held) -> None:
        request = held.request
        greedy = request.temperature == 0
        params = SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens - len(held.sampled),
            logprobs=request.logprobs,  # beside that of the sampled token
            # A request that comes back goes on from another point of its own stream of random numbers.
            seed=None if greedy else derive(held.seed, len(held.sampled)),
            allowed_token_ids=None if request.allowed_token_ids is None else list(request.allowed_token_ids),
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
        )
        held.inside = self._send(request.prompt.tolist() + held.sampled.tokens, params, urgent=request.urgent)
        self._inside[held.inside] = held

    def _send(self, prompt: list[int], params: SamplingParams, *, urgent: bool = False) -> str:
        params.output_kind = RequestOutputKind.DELTA
        self._submissions += 1
        name = str(self._submissions)
        self._core.add_request(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=prompt,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=float(self._submissions),  # which says who came first
                priority=0 if urgent else 1,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
                external_req_id=name,
            )
        )
        return name

    def _take(self, held: _Held, output: EngineCoreOutput, version: int) -> None:
        """Keep what a step sampled."""
        count = len(output.new_token_ids)
        if not count:
            return
        told = output.new_logprobs
        if told is None:
            raise RuntimeError(f"request {held.request.request_id}: vLLM returned tokens without log-probabilities")
        for place, (token, logprob) in enumerate(zip(output.new_token_ids, told.logprobs[:, 0].tolist(), strict=False)):
            held.sampled.add(token, logprob, version)
            if held.request.logprobs:  # the first column is the sampled token's
                held.sampled.rank((told.logprob_token_ids[place, 1:], told.logprobs[place, 1:]))
        if output.prefill_stats is not None:  # of the step that completed the prompt, and of no other
            self.work.prefilled(output.prefill_stats.num_computed_tokens)
        else:
            self.work.decoded(count, count * (len(held.request.prompt) + len(held.sampled) - count))

    def _end(self, held: _Held, output: EngineCoreOutput) -> FinishReason | None:
        """Whether a request is finished: vLLM knows when, but for stop strings."""
        if output.finish_reason is None:
            if not held.request.stop or held.sampled.end() is None:
                return None
            self._core.abort_requests([output.request_id])
            return "stop"
        reason = REASONS.get(output.finish_reason)
        if reason is None:
            raise RuntimeError(
                f"request {held.request.request_id}: vLLM ended it with {output.finish_reason} after "
                f"{len(held.sampled)} tokens; expected stop or length"
            )
        return held.sampled.end() or reason if held.request.stop else reason

    def _finish(self, held: _Held, reason: FinishReason) -> Completion:
        del self._held[held.request.request_id]
        if held.inside is not None:
            del self._inside[held.inside]
        return held.sampled.completion(reason)

    def _withdraw(self) -> None:
        """Take every request out of vLLM; the next step brings them back in the order in which they were added."""
        if self._inside:
            self._core.abort_requests(list(self._inside))
            self._inside.clear()
        for held in self._held.values():
            held.inside = None
        self._outside = dict(self._held)
