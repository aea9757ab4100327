"""Hugging Face weights to Megatron shards and back, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from actors.policy import PolicyError
from actors.trainer.backends.megatron_convert import Shape, merge, rules, shape_of, split
from actors.trainer.model import build_model, hf_state, load_config
from tests.trainer.samples import VOCABULARY, policy


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_there_and_back_is_the_identity(tmp_path: Path, kind: str, tied: bool, ranks: int) -> None:
    directory = policy(tmp_path, kind, tied=tied)
    shape = shape_of(load_config(directory))
    # Every element different from all others of its tensor, norms and biases too.
    state = {
        name: torch.arange(tensor.numel(), dtype=torch.float32).reshape(tensor.shape) + 0.1
        for name, tensor in hf_state(build_model(directory, seed=0, dtype="float32", from_scratch=True)).items()
    }
    shards = [split(rules(shape), state, rank, ranks) for rank in range(ranks)]
    back: dict[str, torch.Tensor] = {}
    for rule in rules(shape):
        back |= merge(rule, [shard[rule.megatron] for shard in shards])
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_queries_keys_and_values_are_packed_by_group(tmp_path: Path) -> None:
    """Four query heads (0 to 3) in two groups, one row a head: Megatron's order is q0 q1 k0 v0 | q2 q3 k1 v1."""
    shape = small_shape(tmp_path)
    state = whole_state(shape)
    prefix = "model.layers.0.self_attn."
    state[prefix + "q_proj.weight"] = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    state[prefix + "k_proj.weight"] = torch.tensor([[10.0], [11.0]])
    state[prefix + "v_proj.weight"] = torch.tensor([[20.0], [21.0]])
    packed = [
        split(rules(shape), state, rank, 2)["decoder.layers.0.self_attention.linear_qkv.weight"] for rank in (0, 1)
    ]
    assert packed[0].flatten().tolist() == [0.0, 1.0, 10.0, 20.0]
    assert packed[1].flatten().tolist() == [2.0, 3.0, 11.0, 21.0]


def test_a_rank_holds_its_part_of_the_gate_then_of_the_up_projection(tmp_path: Path) -> None:
    shape = small_shape(tmp_path)
    state = whole_state(shape)
    state["model.layers.0.mlp.gate_proj.weight"] = torch.tensor([[1.0], [2.0]])
    state["model.layers.0.mlp.up_proj.weight"] = torch.tensor([[3.0], [4.0]])
    fc1 = [split(rules(shape), state, rank, 2)["decoder.layers.0.mlp.linear_fc1.weight"] for rank in (0, 1)]
    assert [part.flatten().tolist() for part in fc1] == [[1.0, 3.0], [2.0, 4.0]]


def test_the_vocabulary_is_padded_with_zero_rows(tmp_path: Path) -> None:
    shape = shape_of(load_config(policy(tmp_path)))
    state = hf_state(build_model(tmp_path, seed=0, dtype="float32", from_scratch=True))
    shards = [split(rules(shape), state, rank, 2)["embedding.word_embeddings.weight"] for rank in (0, 1)]
    assert [len(shard) for shard in shards] == [64, 64]  # 90 rows, padded to twice 64
    assert torch.equal(shards[1][: VOCABULARY - 64], state["model.embed_tokens.weight"][64:])
    assert not shards[1][VOCABULARY - 64 :].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "model_type mistral"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "plain rotary positions"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
    ],
)
def test_a_model_that_megatron_is_not_set_up_for_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    policy(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PolicyError, match=message):
        shape_of(load_config(tmp_path))


def small_shape(directory: Path) -> Shape:
    shape = shape_of(load_config(policy(directory)))
    changes = {"layers": 1, "hidden": 1, "head_dim": 1, "intermediate": 2}
    return Shape(**({name: getattr(shape, name) for name in Shape.__struct_fields__} | changes))


def whole_state(shape: Shape) -> dict[str, torch.Tensor]:
    """All zero; four query rows, two rows of keys, values, gate and up projection."""
    rows = {"embed_tokens": shape.vocabulary, "q_proj": 4, "k_proj": 2, "v_proj": 2, "gate_proj": 2, "up_proj": 2}
    columns = {"o_proj": 4, "down_proj": 2}

    def zeros(name: str) -> torch.Tensor:
        module = name.split(".")[-2]
        return torch.zeros(rows.get(module, 1), columns.get(module, 1))

    return {name: zeros(name) for rule in rules(shape) for name in rule.hugging_face}
