"""A model directory that imitation leaves behind is one for transformers, for ``policy.path`` and for engines."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.env.tokenizers import HuggingFaceTokenizer, load_tokenizer
from actors.policy import Policy, Qwen3Shape, write_config
from actors.settings import TrainSettings
from actors.trainer.backends import make_backend
from actors.trainer.export import write_weights
from coordinator.job import check, convert
from coordinator.modeldir import finish_model, settings_for
from tests.end_to_end.tiny_model import make_model


def written(policy_directory: Path, policy: Policy, directory: Path, *, from_scratch: bool) -> Path:
    settings = TrainSettings(threads=1)
    backend = make_backend(policy_directory, seed=3, settings=settings, dtype=policy.dtype, from_scratch=from_scratch)
    directory.mkdir()
    write_weights(directory, backend.export())
    assert not (directory / "config.json").exists()  # not a model directory before it is complete
    finish_model(directory, policy_directory, policy)
    return directory


def test_a_model_with_a_tokenizer_comes_back_as_it_was(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}))
    policy = Policy(path=str(source))
    made = written(source, policy, tmp_path / "made", from_scratch=False)
    tokens = torch.arange(20)[None]
    before = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(input_ids=tokens).logits
    model = AutoModelForCausalLM.from_pretrained(made)  # in the dtype that its configuration names
    assert model.dtype == torch.float32
    torch.testing.assert_close(model(input_ids=tokens).logits, before, atol=1e-6, rtol=0)
    chat = [{"role": "user", "content": "Higher?"}]
    expected = AutoTokenizer.from_pretrained(source).apply_chat_template(chat, tokenize=False)
    assert AutoTokenizer.from_pretrained(made).apply_chat_template(chat, tokenize=False) == expected
    assert isinstance(load_tokenizer(Policy(path=str(made))), HuggingFaceTokenizer)
    assert settings_for(made, policy) == [f"policy.path={made}"]


def test_a_policy_that_started_from_a_shape_is_one_of_bytes(tmp_path: Path) -> None:
    shape = Qwen3Shape(hidden_size=32, layers=1)
    write_config(shape, tmp_path / "policy")
    made = written(tmp_path / "policy", Policy(shape=shape), tmp_path / "made", from_scratch=True)
    assert sorted(path.name for path in made.iterdir()) == ["config.json", "model.safetensors"]
    assert settings_for(made, Policy(shape=shape)) == [f"policy.path={made}", "policy.tokenizer=bytes"]
    job = convert({}, "job", settings_for(made, Policy(shape=shape)))
    check(job)
    assert load_tokenizer(job.policy).vocab_size == 264
    AutoModelForCausalLM.from_pretrained(made)
