"""vLLM on a real GPU: CUDA graphs together with reloading, and tensor parallelism; skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from actors.proxy.engines.protocol import GenerateRequest
from actors.proxy.engines.vllm_engine import GPU, VllmEngine
from tests.engines.reference import Reference, finish, prompt, write_tiny_policy

pytestmark = pytest.mark.skipif(not GPU, reason="torch sees no GPU")

NATS = 5e-3
"""Between float32 kernels of a GPU and of a CPU."""


@pytest.mark.parametrize(("devices", "graphs"), [(1, True), (1, False), (2, True)])
def test_each_version_is_what_recorded_kernels_compute_with(tmp_path: Path, devices: int, graphs: bool) -> None:
    """A graph that kept an address of older weights would sample from them: log-probabilities would be far off."""
    if torch.cuda.device_count() < devices:
        pytest.skip(f"{devices} GPUs are needed, {torch.cuda.device_count()} are there")
    policy_dir = write_tiny_policy(tmp_path, tied=False)
    reference = Reference(policy_dir, versions=(0, 1, 2))
    engine = VllmEngine(policy_dir, max_sequences=4, max_model_len=95, tensor_parallel=devices, cuda_graphs=graphs)
    try:
        for version in (0, 1, 2):
            engine.load_weights(version, reference.weights(version))
            tokens = prompt(20, version)
            np.testing.assert_allclose(engine.score(tokens), reference.score(version, tokens), rtol=0, atol=NATS)
            requests = [GenerateRequest(f"r{version}-{n}", f"t{n}", prompt(12, n), 30, seed=n) for n in range(4)]
            for request in requests:
                engine.add(request)
            answers = finish(engine)
            for request in requests:
                answer = answers[request.request_id]
                np.testing.assert_allclose(answer.logprobs, reference.behaviour(request, answer), rtol=0, atol=NATS)
    finally:
        engine.close()
