"""A policy directory gives exactly the weights that it holds, or one error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.policy import PolicyError
from actors.trainer.model import build_model, hf_state
from tests.trainer.samples import VOCABULARY, policy

FIRST_SHARD = "model-00001-of-"


def built(directory: Path, *, from_scratch: bool, seed: int = 0, dtype: str = "float32") -> dict[str, torch.Tensor]:
    model = build_model(directory, seed=seed, dtype=dtype, from_scratch=from_scratch)
    return {name: tensor.detach() for name, tensor in hf_state(model).items()}


def pretrained(directory: Path, shard_size: str) -> Path:
    """A model directory as transformers itself writes it, from seed 0."""
    model: Any = build_model(policy(directory), seed=0, dtype="float32", from_scratch=True)
    model.save_pretrained(directory, max_shard_size=shard_size)
    return directory


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize("shard_size", ["30KB", "1GB"])
def test_weights_are_those_of_the_files(tmp_path: Path, shard_size: str) -> None:
    directory = pretrained(tmp_path, shard_size)
    assert (len(list(directory.glob("*.safetensors"))) > 1) == (shard_size == "30KB")
    loaded = built(directory, from_scratch=False, seed=5)
    assert same(loaded, built(directory, from_scratch=True, seed=0))
    assert not same(loaded, built(directory, from_scratch=True, seed=5))
    assert "lm_head.weight" not in loaded  # tied


def test_building_leaves_the_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    build_model(policy(tmp_path), seed=0, dtype="float32", from_scratch=True)
    assert torch.equal(torch.rand(3), expected)


def test_bfloat16_rounds_the_same_weights_and_keeps_rotary_frequencies(tmp_path: Path) -> None:
    directory = policy(tmp_path)
    whole = built(directory, from_scratch=True)
    rounded = built(directory, from_scratch=True, dtype="bfloat16")
    assert all(torch.equal(whole[name].bfloat16(), tensor) for name, tensor in rounded.items())
    model = build_model(directory, seed=0, dtype="bfloat16", from_scratch=True)
    assert {buffer.dtype for _, buffer in model.named_buffers()} == {torch.float32}


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = pretrained(tmp_path, "30KB")
    shard = next(directory.glob(FIRST_SHARD + "*"))
    shard.unlink()
    with pytest.raises(PolicyError, match=f"{shard.name}: no such file"):
        built(directory, from_scratch=False)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_a_corrupt_file_is_named(tmp_path: Path, damage: str) -> None:
    directory = pretrained(tmp_path, "1GB")
    path = directory / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes({"truncated": data[:-8], "garbage": b"\xff" * 64, "empty": b""}[damage])
    with pytest.raises(PolicyError, match=r"model\.safetensors: not a complete safetensors file"):
        built(directory, from_scratch=False)


def test_a_weight_that_is_in_no_file_is_named(tmp_path: Path) -> None:
    directory = pretrained(tmp_path, "1GB")
    path = directory / "model.safetensors"
    held = load_file(path)
    del held["model.layers.1.mlp.up_proj.weight"]
    save_file(held, path)
    with pytest.raises(PolicyError, match=r"1 weights .* model\.layers\.1\.mlp\.up_proj\.weight"):
        built(directory, from_scratch=False)


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    directory = pretrained(tmp_path, "1GB")
    path = directory / "model.safetensors"
    save_file(load_file(path) | {"model.norm.weight": torch.ones(31)}, path)
    with pytest.raises(PolicyError, match=r"model\.safetensors: model\.norm\.weight has shape \(31,\).*\(32,\)"):
        built(directory, from_scratch=False)


def test_a_directory_that_is_no_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"config\.json: no such file"):
        built(tmp_path, from_scratch=True)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(PolicyError, match=r"config\.json: not a model configuration"):
        built(tmp_path, from_scratch=True)
    policy(tmp_path)
    with pytest.raises(PolicyError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        built(tmp_path, from_scratch=False)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(PolicyError, match=r"index\.json: not an index of weights"):
        built(tmp_path, from_scratch=False)


def test_a_model_that_rescales_its_logits_is_refused(tmp_path: Path) -> None:
    policy(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"final_logit_softcapping": 30.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PolicyError, match="final_logit_softcapping"):
        built(tmp_path, from_scratch=True)


def test_the_row_of_the_padding_token_is_trained_like_any_other(tmp_path: Path) -> None:
    model: Any = build_model(policy(tmp_path), seed=0, dtype="float32", from_scratch=True)
    model(input_ids=torch.tensor([[7, 3]])).logits[0, -1, 0].backward()  # 7 is the padding token
    gradient = model.get_input_embeddings().weight.grad
    assert gradient.shape[0] == VOCABULARY
    assert gradient[7].abs().max() > 0
