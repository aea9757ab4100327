"""The process of one engine: ``python -m actors.proxy.engines.process SPEC``.

It builds the engine (which sets process-wide state: threads, dynamo, environment variables), hosts it, tells the proxy
that it is ready, and reports its spans until it is stopped.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from actors.core.hosting import ChildContext, read_settings, run_child
from actors.env.tokenizers import load_tokenizer
from actors.policy import Policy
from actors.proxy.engines import EngineKind, make_engine
from actors.proxy.engines.host import LOAD_EVERY_S, TOKENS_EVERY_S, EngineHost
from actors.proxy.engines.protocol import Engine, EngineLimits, KvRole
from actors.proxy.messages import Acknowledged, EngineReady
from actors.telemetry import Spans, report_spans
from hwprobe.telemetry import GpuTelemetry

READY_TIMEOUT_S = 30.0


class EngineProcessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine process is told."""

    kind: EngineKind
    policy_directory: str
    dtype: str
    limits: EngineLimits
    seed: int
    tensor_parallel: int = 1
    cuda_graphs: bool = True
    policy: Policy | None = None  # whose tokenizer reads tokens, for stop strings; None: there are none
    kv_store: tuple[str, KvRole] | None = None  # a directory for prompts that engines share, and what this one does
    url: str | None = None  # of a server
    key_variable: str | None = None  # environment variable that has the server's key
    proxy_actor: str = "proxy"
    load_every_s: float = LOAD_EVERY_S  # how often it is measured, and told, how loaded the engine is
    tokens_every_s: float = TOKENS_EVERY_S  # how often it is told what running requests have sampled


async def work(context: ChildContext) -> Callable[[], Awaitable[None]]:
    settings = read_settings(context.spec, EngineProcessSettings)
    name = context.spec.name
    start = time.monotonic()
    engine = _build(settings)
    spans = Spans(name)
    proxy = context.parent(settings.proxy_actor)

    def hosted() -> EngineHost:
        return EngineHost(
            name,
            engine,
            proxy,
            spans,
            context.fail,
            gpus=GpuTelemetry(settings.load_every_s),
            load_every_s=settings.load_every_s,
            tokens_every_s=settings.tokens_every_s,
        )

    host = await context.node.spawn(hosted, "engine", restarts=0)
    ready = EngineReady(name, host, engine.limits, time.monotonic() - start)
    await context.node.ask(proxy, ready, Acknowledged, timeout_s=READY_TIMEOUT_S, retries=3)
    context.node.background(report_spans(context.node, context.spec.telemetry, spans))
    return _nothing


def _build(settings: EngineProcessSettings) -> Engine:
    """Takes seconds, in which the loop does not run: being told to stop ends the process there and then."""
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        from actors.gpu_memory import keep_to_share  # noqa: PLC0415  (imports torch: part of the seconds)

        keep_to_share()
        return make_engine(
            settings.kind,
            Path(settings.policy_directory),
            max_sequences=settings.limits.max_sequences,
            max_model_len=settings.limits.max_model_len,
            dtype=settings.dtype,
            seed=settings.seed,
            tensor_parallel=settings.tensor_parallel,
            cuda_graphs=settings.cuda_graphs,
            kv_store=None if settings.kv_store is None else (Path(settings.kv_store[0]), settings.kv_store[1]),
            url=settings.url,
            key=os.environ.get(settings.key_variable) if settings.key_variable else None,
            texts=None if settings.policy is None else load_tokenizer(settings.policy).decode,
        )
    finally:
        signal.signal(signal.SIGTERM, handler)


async def _nothing() -> None:
    """The node stops the actor, and the actor the engine."""


if __name__ == "__main__":
    run_child(work)
