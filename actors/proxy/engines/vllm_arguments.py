"""How vLLM is set up: one function from what an engine is asked for to vLLM's own arguments.

Invariant: what is sampled is what is recorded, whatever the hardware: exact versions, log-probabilities of the
distribution sampled from, the policy's own precision. Only how fast it is depends on the hardware: CUDA graphs where
there is a GPU, and nothing that vLLM's CPU build gets wrong where there is none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import psutil
from vllm.engine.arg_utils import EngineArgs

from actors.proxy.engines.protocol import MAX_ALTERNATIVES, EngineLimits, KvRole
from actors.proxy.engines.torch_weights import policy_dtype
from actors.proxy.engines.vllm_kv import kv_transfer

CPU_BLOCK = 32
"""Tokens of a KV block without a GPU; vLLM's CPU attention wants a multiple of 32."""

STEP_TOKENS = 2048
"""New tokens of one step without a GPU, where a prompt is not longer."""


@dataclass(frozen=True)
class Setup:
    """What an engine is asked for. ``kv_cache_bytes`` bounds the KV cache of all its devices; None: see
    ``engine_arguments``."""

    policy_dir: Path
    limits: EngineLimits
    seed: int = 0
    dtype: str | None = None
    kv_cache_bytes: int | None = None
    tensor_parallel: int = 1
    cuda_graphs: bool = True
    kv_store: tuple[Path, KvRole] | None = None
    gpu_share: float | None = None  # of each GPU's memory, weights and all; None: what vLLM takes by itself


def engine_arguments(setup: Setup, *, gpu: bool) -> EngineArgs:
    """vLLM's arguments. By default the KV cache takes what the weights leave of the GPUs' share, which vLLM measures;
    without a GPU it holds twice ``max_sequences`` full sequences, so that trajectories find their prefix again, or what
    a quarter of the free memory holds."""
    sequences, longest = setup.limits.max_sequences, setup.limits.max_model_len + 1
    arguments = EngineArgs(
        model=str(setup.policy_dir),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=setup.dtype or policy_dtype(setup.policy_dir),  # "auto" takes float32 weights down to 16 bits
        max_num_seqs=sequences,
        max_model_len=longest,  # a full sequence can still be scored, which samples one token more
        logprobs_mode="processed_logprobs",
        max_logprobs=MAX_ALTERNATIVES,
        enable_prefix_caching=True,
        prefix_caching_hash_algo="sha256_cbor",  # the default hashes pickles
        async_scheduling=False,  # a token in flight while weights change would carry the wrong version
        scheduling_policy="priority",  # urgent ones first, then as they came
        enforce_eager=not (gpu and setup.cuda_graphs),
        disable_log_stats=True,
        seed=setup.seed,
        worker_extension_cls=f"{__package__}.vllm_worker.WeightTaker",
        block_size=None if gpu else CPU_BLOCK,
        # Without a GPU a seeded request whose prompt is taken in pieces kills vLLM ("CPU Generator does not use
        # offset"): there every prompt runs whole.
        enable_chunked_prefill=None if gpu else False,
        max_num_batched_tokens=None if gpu else _step_tokens(sequences, longest),
        tensor_parallel_size=setup.tensor_parallel,
        # A process a device, which ends when this one does; a single one is this process itself.
        distributed_executor_backend="mp" if setup.tensor_parallel > 1 else "uni",
    )
    if setup.kv_store is not None:
        arguments.kv_transfer_config = kv_transfer(*setup.kv_store)
    if gpu and setup.gpu_share is not None:
        arguments.gpu_memory_utilization = setup.gpu_share
    kv_cache_bytes = setup.kv_cache_bytes
    if kv_cache_bytes is None and not gpu:
        kv_cache_bytes = _affordable(2 * sequences, _sequence_bytes(arguments, longest))
    if kv_cache_bytes is not None:
        arguments.kv_cache_memory_bytes = math.ceil(kv_cache_bytes / setup.tensor_parallel)  # of each device
    return arguments


def _step_tokens(sequences: int, longest: int) -> int:
    """Room for one whole prompt and a token of everybody else, and no more than all sequences together have."""
    return min(max(STEP_TOKENS, longest + sequences), sequences * longest)


def _affordable(sequences: int, sequence_bytes: int) -> int:
    """Bytes of the KV cache: for so many sequences, or fewer where they would fill the host's memory."""
    return max(sequence_bytes, min(sequences * sequence_bytes, psutil.virtual_memory().available // 4))


def _sequence_bytes(arguments: EngineArgs, longest: int) -> int:
    """Bytes of keys and values of one full sequence, in whole blocks."""
    config = arguments.create_model_config()
    text = config.hf_text_config
    kv_heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    per_token = 2 * int(text.num_hidden_layers) * kv_heads * int(config.get_head_size()) * config.dtype.itemsize
    blocks = -(-longest // CPU_BLOCK)
    return int(blocks * CPU_BLOCK * per_token)
