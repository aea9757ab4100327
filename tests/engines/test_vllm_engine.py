"""What only vLLM does: prompts that do not fit into one step together, preemption where the cache is full, and layers
that keep nothing of their weights but what a library made of them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

pytest.importorskip("vllm")

from actors.proxy.engines import vllm_arguments
from actors.proxy.engines.protocol import GenerateRequest
from actors.proxy.engines.torch_weights import tensor_digest
from actors.proxy.engines.vllm_engine import VllmEngine
from tests.engines.reference import Reference, finish, prompt, write_tiny_policy


def check(directory: Path, requests: list[GenerateRequest], **options: Any) -> None:
    policy_dir = write_tiny_policy(directory, tied=True)
    reference = Reference(policy_dir, versions=(0,))
    engine = VllmEngine(policy_dir, max_sequences=6, max_model_len=127, **options)
    try:
        engine.load_weights(0, reference.weights(0))
        for request in requests:
            engine.add(request)
        answers = finish(engine)
        for request in requests:
            answer = answers[request.request_id]
            assert len(answer.tokens) == request.max_tokens
            np.testing.assert_allclose(answer.logprobs, reference.behaviour(request, answer), rtol=0, atol=1e-4)
    finally:
        engine.close()


def test_seeded_prompts_that_do_not_fit_into_one_step_wait_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken in pieces they would end vLLM's process where there is no GPU."""
    monkeypatch.setattr(vllm_arguments, "STEP_TOKENS", 1)
    requests = [GenerateRequest(f"r{i}", f"t{i}", prompt(90 + i, i), 6, seed=i) for i in range(9)]
    check(tmp_path, requests)


def test_an_engine_that_is_killed_leaves_no_file_where_temporary_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    engine = VllmEngine(write_tiny_policy(tmp_path, tied=True), max_sequences=6, max_model_len=127)
    try:
        left = [path for path in (tmp_path / "temporary").rglob("*") if path.is_file()]
    finally:
        engine.close()
    assert left == []


def test_requests_preempted_for_want_of_cache_come_back_with_the_right_logprobs(tmp_path: Path) -> None:
    block_bytes = 32 * 2 * 2 * 2 * 32 * 4  # tokens x (keys, values) x layers x heads x size of a head x float32
    requests = [GenerateRequest(f"r{i}", f"t{i}", prompt(30, i), 90, seed=i) for i in range(6)]
    check(tmp_path, requests, kv_cache_bytes=9 * block_bytes)


@pytest.mark.parametrize("own", [True, False], ids=["packed layers alone", "vLLM's own reload"])
def test_a_version_that_comes_after_one_that_broke_off_is_computed_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    if not own:
        monkeypatch.setattr("actors.proxy.engines.vllm_worker.packed_layers", lambda model: None)
    policy_dir = write_tiny_policy(tmp_path, tied=False)
    reference = Reference(policy_dir, versions=(0, 1, 2))
    tokens = prompt(20, 5)
    engine = VllmEngine(policy_dir, max_sequences=2, max_model_len=127)
    try:
        engine.load_weights(0, reference.weights(0))
        with pytest.raises(OSError, match="the connection is gone"):
            engine.load_weights(1, breaking_off(reference.weights(1)))
        engine.load_weights(2, reference.weights(2))
        np.testing.assert_allclose(engine.score(tokens), reference.score(2, tokens), rtol=0, atol=1e-4)
    finally:
        engine.close()


def breaking_off(weights: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from weights[: len(weights) // 2]
    raise OSError("the connection is gone")


def test_an_engine_on_two_devices_computes_each_version_and_proves_what_both_have_loaded(tmp_path: Path) -> None:
    """Here a device is a process with one thread; with GPUs it is one each (``tests/gpu``)."""
    policy_dir = write_tiny_policy(tmp_path, tied=False)
    reference = Reference(policy_dir, versions=(0, 1))
    tokens = prompt(20, 5)
    engine = VllmEngine(policy_dir, max_sequences=4, max_model_len=95, tensor_parallel=2)
    try:
        for version in (0, 1):
            weights = reference.weights(version)
            assert engine.load_weights(version, weights) == {name: tensor_digest(each) for name, each in weights}
            np.testing.assert_allclose(engine.score(tokens), reference.score(version, tokens), rtol=0, atol=1e-4)
            request = GenerateRequest(f"r{version}", "t", tokens, 6, seed=version)
            engine.add(request)
            answer = finish(engine)[request.request_id]
            np.testing.assert_allclose(answer.logprobs, reference.behaviour(request, answer), rtol=0, atol=1e-4)
    finally:
        engine.close()


WORKERS = """
import sys, psutil
from pathlib import Path
from actors.proxy.engines.vllm_engine import VllmEngine

if __name__ == "__main__":
    engine = VllmEngine(Path(sys.argv[1]), max_sequences=2, max_model_len=95, tensor_parallel=2)
    print("workers:", *(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    sys.stdin.read()
"""


@pytest.mark.deep
def test_no_process_of_an_engine_on_two_devices_outlives_it(tmp_path: Path) -> None:
    policy_dir, script = write_tiny_policy(tmp_path, tied=True), tmp_path / "engine.py"
    script.write_text(WORKERS)
    with subprocess.Popen(
        [sys.executable, str(script), str(policy_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    ) as engine:
        try:
            lines: Iterable[str] = [] if engine.stdout is None else engine.stdout
            told = next(line for line in lines if line.startswith("workers:"))  # vLLM has its say, too
        finally:
            engine.kill()
    pids = [int(pid) for pid in told.split()[1:]]
    workers = [process for process in psutil.process_iter() if process.pid in pids]
    assert len(pids) >= 2
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert alive == []
