"""What vLLM is told, without and with a GPU (of which the arguments are all that can be looked at here)."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from actors.proxy.engines.protocol import EngineLimits
from actors.proxy.engines.vllm_arguments import Setup, engine_arguments
from tests.engines.reference import write_tiny_policy

LIMITS = EngineLimits(max_sequences=4, max_model_len=127)
SEQUENCE_BYTES = 128 * 2 * 2 * 2 * 32 * 4  # tokens x (keys, values) x layers x heads x size of a head x float32


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return write_tiny_policy(tmp_path, tied=True)


@pytest.mark.parametrize(("gpu", "wanted", "eager"), [(True, True, False), (True, False, True), (False, True, True)])
def test_cuda_graphs_are_on_where_there_is_a_gpu_and_they_are_wanted(
    policy: Path, gpu: bool, wanted: bool, eager: bool
) -> None:
    assert engine_arguments(Setup(policy, LIMITS, cuda_graphs=wanted), gpu=gpu).enforce_eager is eager


@pytest.mark.parametrize("gpu", [True, False])
def test_what_is_recorded_is_what_is_sampled_from_on_any_hardware(policy: Path, gpu: bool) -> None:
    arguments = engine_arguments(Setup(policy, LIMITS), gpu=gpu)
    assert arguments.logprobs_mode == "processed_logprobs"
    assert arguments.dtype == "float32"
    assert arguments.async_scheduling is False
    assert arguments.max_model_len == 128


def test_devices_share_the_cache_and_the_heads(policy: Path) -> None:
    alone, shared = (engine_arguments(Setup(policy, LIMITS, tensor_parallel=count), gpu=False) for count in (1, 2))
    assert alone.kv_cache_memory_bytes == 2 * 4 * SEQUENCE_BYTES
    assert shared.kv_cache_memory_bytes == 4 * SEQUENCE_BYTES  # of each
    assert (alone.distributed_executor_backend, shared.distributed_executor_backend) == ("uni", "mp")
    assert shared.tensor_parallel_size == 2


def test_the_cache_takes_what_weights_leave_of_a_gpus_share_unless_it_was_given(policy: Path) -> None:
    """Twice all sequences of an 8B model would be several times what a GPU holds."""
    measured = engine_arguments(Setup(policy, LIMITS, gpu_share=0.4), gpu=True)
    assert (measured.gpu_memory_utilization, measured.kv_cache_memory_bytes) == (0.4, None)
    given = engine_arguments(Setup(policy, LIMITS, gpu_share=0.4, kv_cache_bytes=10 << 20), gpu=True)
    assert given.kv_cache_memory_bytes == 10 << 20
