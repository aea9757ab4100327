"""What only the embedded engine has: any causal language model, slots, and prompts taken in pieces."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from actors.proxy.engines import make_engine, torch_attention, torch_engine
from actors.proxy.engines.protocol import Begun, GenerateRequest
from actors.proxy.engines.torch_attention import StepPlan
from actors.proxy.engines.torch_engine import TorchEngine
from tests.engines.reference import VOCABULARY, Reference, finish, prompt, write_tiny_policy

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "float32",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2.5": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2.5 with windows": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
        "tie_word_embeddings": False,
    },
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False},
    "llama with scaled positions": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama whose positions are scaled by length": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    },
    "llama with biases": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "qwen3 with biases": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "a structure that the decoder does not know": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 16,
        "tie_word_embeddings": False,
    },
    "llama with a head for each query": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
}


def policy(directory: Path, changes: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(COMMON | changes))
    return directory


def started(policy_dir: Path, reference: Reference, **options: Any) -> TorchEngine:
    engine = TorchEngine(policy_dir, **{"max_sequences": 8, "max_model_len": 160} | options)
    engine.load_weights(0, reference.weights(0))
    return engine


@pytest.mark.parametrize("changes", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_other_architectures_agree_with_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    policy_dir = policy(tmp_path, changes)
    reference = Reference(policy_dir, versions=(0,))
    engine = started(policy_dir, reference)
    history = {f"t{i}": prompt(5 + 17 * i, i) for i in range(5)}
    for turn in range(3):
        requests = [GenerateRequest(f"{name}.{turn}", name, tokens, 6, seed=turn) for name, tokens in history.items()]
        for request in requests:
            engine.add(request)
        answers = finish(engine)
        for request in requests:
            answer = answers[request.request_id]
            np.testing.assert_allclose(answer.logprobs, reference.behaviour(request, answer), rtol=0, atol=1e-4)
            history[request.trajectory] = np.concatenate([request.prompt, answer.tokens, prompt(3, 70 + turn)])
    np.testing.assert_allclose(engine.score(prompt(150)), reference.score(0, prompt(150)), rtol=0, atol=1e-4)


def test_prompts_longer_than_a_step_are_taken_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "STEP_TOKENS", 24)
    policy_dir = write_tiny_policy(tmp_path, tied=True)
    reference = Reference(policy_dir, versions=(0, 1))
    engine = started(policy_dir, reference)
    requests = [
        GenerateRequest(f"r{i}", f"t{i}", prompt(length, i), 8) for i, length in enumerate([5, 100, 30, 1, 130])
    ]
    for request in requests:
        engine.add(request)
    for _ in range(3):
        engine.step()
    engine.load_weights(1, reference.weights(1))
    answers = finish(engine)
    for request in requests:
        answer = answers[request.request_id]
        np.testing.assert_allclose(answer.logprobs, reference.behaviour(request, answer), rtol=0, atol=1e-4)
    np.testing.assert_allclose(engine.score(prompt(100)), reference.score(1, prompt(100)), rtol=0, atol=1e-4)


def test_steps_that_follow_on_from_the_last_one_agree_with_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows decode together, outgrow their group one after the other, leave at different moments and are joined by
    one more; some lie together in the store, some do not."""
    monkeypatch.setattr(torch_attention, "LENGTH_BUCKETS", (16, 24))
    policy_dir = write_tiny_policy(tmp_path, tied=True)
    reference = Reference(policy_dir, versions=(0,))
    engine = started(policy_dir, reference)
    requests = [
        GenerateRequest(f"r{i}", f"t{i}", prompt(9 + i, i), 12 + 4 * i, temperature=temperature, seed=i)
        for i, temperature in enumerate([1.0, 0.7, 0.0, 1.0])
    ]
    late = GenerateRequest("late", "late", prompt(20, 9), 8, seed=9)
    for request in requests:
        engine.add(request)
    aborted = GenerateRequest("aborted", "aborted", prompt(12, 8), 30, seed=8)
    engine.add(aborted)
    for _ in range(6):
        assert not engine.step()
    ended = engine.abort("aborted")
    assert ended is not None
    answers = {"aborted": ended}
    for _ in range(3):
        assert not engine.step()
    engine.add(late)
    answers |= finish(engine)
    assert len(answers) == 6
    for request in [*requests, late, aborted]:
        answer = answers[request.request_id]
        np.testing.assert_allclose(answer.logprobs, reference.behaviour(request, answer), rtol=0, atol=1e-4)


def test_a_turn_computes_only_what_it_added(tmp_path: Path) -> None:
    policy_dir = write_tiny_policy(tmp_path, tied=True)
    engine = started(policy_dir, Reference(policy_dir, versions=(0,)))
    computed = computed_tokens(engine)
    history = prompt(100)
    for turn in range(3):
        engine.add(GenerateRequest(f"r{turn}", "t", history, 1))
        answer = finish(engine)[f"r{turn}"]
        history = np.concatenate([history, answer.tokens, prompt(5, turn)])
    engine.forget("t")
    engine.add(GenerateRequest("again", "t", history, 1))
    finish(engine)
    assert computed == [100, 6, 6, 118]


def computed_tokens(engine: TorchEngine) -> list[int]:
    """From now on: how many tokens each forward pass computes."""
    computed: list[int] = []
    watch(engine, lambda plan, keep: computed.append(plan.tokens.numel()))
    return computed


def watch(engine: TorchEngine, see: Callable[[StepPlan, torch.Tensor], None]) -> None:
    """Show each forward pass's plan and the places whose logits it returns."""
    run = engine._run

    def watched(plan: StepPlan, keep: torch.Tensor) -> torch.Tensor:
        see(plan, keep)
        return run(plan, keep)

    engine._run = watched


def test_what_requests_begin_with_is_computed_once(tmp_path: Path) -> None:
    policy_dir = write_tiny_policy(tmp_path, tied=True)
    reference = Reference(policy_dir, versions=(0,))
    engine = started(policy_dir, reference)
    computed = computed_tokens(engine)
    group = [GenerateRequest(f"a{i}", f"a{i}", prompt(60), 3, seed=i) for i in range(3)]
    longer = [
        GenerateRequest(f"b{i}", f"b{i}", np.concatenate([prompt(40), prompt(10 + i, 9 + i)]), 3, seed=i)
        for i in range(2)
    ]
    for request in group + longer:
        engine.add(request)
    answers = finish(engine)
    # The first one's prompt; of it all but the last token for its fellows, 40 for the others; then a token each.
    assert computed == [60, 1 + 2 * 1 + (10 + 11), 5, 4]
    for request in group + longer:
        answer = answers[request.request_id]
        np.testing.assert_allclose(answer.logprobs, reference.behaviour(request, answer), rtol=0, atol=1e-4)


def test_who_waits_for_a_prompt_goes_on_by_itself_when_that_request_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_engine, "STEP_TOKENS", 24)
    policy_dir = write_tiny_policy(tmp_path, tied=True)
    engine = started(policy_dir, Reference(policy_dir, versions=(0,)))
    computed = computed_tokens(engine)
    for i in range(2):
        engine.add(GenerateRequest(f"r{i}", f"r{i}", prompt(60), 1, seed=i))
    engine.step()
    engine.abort("r0")
    assert set(finish(engine)) == {"r1"}
    assert computed == [24, 24, 12]  # the 24 that were there, copied, and the rest


def test_new_weights_share_a_prompt_anew(tmp_path: Path) -> None:
    policy_dir = write_tiny_policy(tmp_path, tied=True)
    reference = Reference(policy_dir, versions=(0, 1))
    engine = started(policy_dir, reference)
    requests = [GenerateRequest(f"r{i}", f"r{i}", prompt(60), 4, seed=i) for i in range(2)]
    for request in requests:
        engine.add(request)
    for _ in range(3):
        engine.step()
    computed = computed_tokens(engine)
    engine.load_weights(1, reference.weights(1))
    answers = finish(engine)
    assert computed[0] == 63  # 60 and the three tokens that r0 has by now
    assert sum(computed) < 2 * 60
    for request in requests:
        answer = answers[request.request_id]
        assert answer.versions.tolist()[-1] == 1
        np.testing.assert_allclose(answer.logprobs, reference.behaviour(request, answer), rtol=0, atol=1e-4)


def test_the_head_sees_one_place_a_row(tmp_path: Path) -> None:
    policy_dir = write_tiny_policy(tmp_path, tied=True)
    engine = started(policy_dir, Reference(policy_dir, versions=(0,)))
    seen: list[int] = []
    watch(engine, lambda plan, keep: seen.append(len(keep)))
    for i in range(3):
        engine.add(GenerateRequest(f"r{i}", f"t{i}", prompt(20 + 30 * i, i), 2))
    finish(engine)
    assert seen == [3, 3]


def test_a_bounded_cache_lowers_the_limit_and_still_answers_all(tmp_path: Path) -> None:
    policy_dir = write_tiny_policy(tmp_path, tied=True)
    reference = Reference(policy_dir, versions=(0,))
    slot_bytes = 160 * 2 * 2 * 2 * 32 * 4  # tokens x (keys, values) x layers x heads x size of a head x float32
    engine = started(policy_dir, reference, kv_cache_bytes=4 * slot_bytes)
    assert engine.limits.max_sequences == 3
    for i in range(7):
        engine.add(GenerateRequest(f"r{i}", f"t{i}", prompt(30, i), 4, temperature=0.0))
    answers = finish(engine)
    for i in range(7):
        assert answers[f"r{i}"].tokens.tolist() == reference.greedy(0, prompt(30, i), 4)
    with pytest.raises(ValueError, match=f"{2 * slot_bytes} bytes is the least"):
        started(policy_dir, reference, kv_cache_bytes=2 * slot_bytes - 1)


def test_bfloat16_runs_in_bfloat16_and_stays_near_float32(tmp_path: Path) -> None:
    policy_dir = write_tiny_policy(tmp_path, tied=True)
    reference = Reference(policy_dir, versions=(0,), scale=0.05)
    engine = TorchEngine(policy_dir, max_sequences=2, max_model_len=64, dtype="bfloat16")
    engine.load_weights(0, reference.weights(0))
    assert {parameter.dtype for parameter in engine._parameters.values()} == {torch.bfloat16}
    request = GenerateRequest("r", "t", prompt(30), 8, seed=1)
    engine.add(request)
    answer = finish(engine)["r"]
    assert answer.logprobs.dtype == np.float32
    difference = np.abs(answer.logprobs - reference.behaviour(request, answer))
    assert 0 < difference.max() < 0.2


def test_an_unknown_engine_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected torch, vllm, openai or sglang, found 'trt'"):
        make_engine("trt", tmp_path, max_sequences=1, max_model_len=8)  # type: ignore[arg-type]


def test_naming_the_engines_imports_no_model_code() -> None:
    code = "import sys, actors.proxy.engines.protocol, actors.proxy.engines; print({'torch','vllm'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "set()"


def test_what_is_drawn_goes_on_in_the_requests_own_stream_when_it_moves_to_another_engine(tmp_path: Path) -> None:
    """So a sampled request, too, ends as if it had never moved."""
    policy_dir = write_tiny_policy(tmp_path, tied=True)
    reference = Reference(policy_dir, versions=(0,))
    first, second = started(policy_dir, reference), started(policy_dir, reference)
    request = GenerateRequest("r", "t", prompt(9, 1), 30, seed=5)
    first.add(request)
    unmoved = finish(first)["r"]
    first.add(request)
    for _ in range(11):
        first.step()
    stopped = first.abort("r")
    assert stopped is not None
    begun = Begun(stopped.tokens, stopped.logprobs, stopped.versions)
    second.add(msgspec.structs.replace(request, begun=begun))
    moved = finish(second)["r"]
    assert len(begun.tokens) == 11
    assert moved.tokens.tolist() == unmoved.tokens.tolist()
    np.testing.assert_allclose(moved.logprobs, unmoved.logprobs, rtol=0, atol=1e-4)
