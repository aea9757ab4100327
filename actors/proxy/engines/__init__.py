"""Inference engines behind one protocol, made by name; importing this package imports no model code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from actors.proxy.engines.protocol import Engine, KvRole
    from actors.proxy.engines.sampled import Texts

EngineKind = Literal["torch", "vllm", "openai", "sglang"]


def make_engine(
    kind: EngineKind,
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
    url: str | None = None,
    key: str | None = None,
) -> Engine:
    """An engine with the policy of ``policy_dir/config.json`` that serves nothing before ``load_weights``.

    ``seed`` draws for requests that bring none. ``dtype`` ("float32", "bfloat16") is config.json's unless given.
    ``kv_cache_bytes`` bounds the KV cache; by default it holds twice ``max_sequences``. ``texts``
    reads tokens; without it, requests with stop strings are refused. An engine sets process-wide
    state: give each a process of its own, and its thread count by OMP_NUM_THREADS before this is called.
    ``tensor_parallel`` (vLLM alone) is the number of devices, ``cuda_graphs`` is vLLM's on a GPU, ``kv_store`` is
    where vLLM engines share prompts, and whether this one writes or reads them. ``url`` and ``key``
    are those of a server (openai, sglang), which is set up by whoever has started it.
    """
    if kind == "torch":
        if tensor_parallel != 1:
            raise ValueError(f"the torch engine runs on one device, found tensor_parallel={tensor_parallel}")
        from actors.proxy.engines.torch_engine import TorchEngine  # noqa: PLC0415

        return TorchEngine(
            policy_dir,
            max_sequences=max_sequences,
            max_model_len=max_model_len,
            seed=seed,
            dtype=dtype,
            kv_cache_bytes=kv_cache_bytes,
            texts=texts,
        )
    if kind == "vllm":
        from actors.proxy.engines.vllm_engine import VllmEngine  # noqa: PLC0415

        return VllmEngine(
            policy_dir,
            max_sequences=max_sequences,
            max_model_len=max_model_len,
            seed=seed,
            dtype=dtype,
            kv_cache_bytes=kv_cache_bytes,
            tensor_parallel=tensor_parallel,
            cuda_graphs=cuda_graphs,
            texts=texts,
            kv_store=kv_store,
        )
    if kind == "openai" and url is not None:
        from actors.proxy.engines.openai_engine import OpenAIEngine  # noqa: PLC0415

        return OpenAIEngine(
            policy_dir,
            url=url,
            key=key,
            max_sequences=max_sequences,
            max_model_len=max_model_len,
            seed=seed,
            texts=texts,
        )
    if kind == "sglang" and url is not None:
        from actors.proxy.engines.sglang_engine import SglangEngine  # noqa: PLC0415

        return SglangEngine(
            policy_dir,
            url=url,
            key=key,
            max_sequences=max_sequences,
            max_model_len=max_model_len,
            seed=seed,
            texts=texts,
        )
    if kind in ("openai", "sglang"):
        raise ValueError(f"rollout.engine: a {kind} engine is a server: expected its URL (rollout.servers), found none")
    raise ValueError(f"rollout.engine: expected torch, vllm, openai or sglang, found {kind!r}")
