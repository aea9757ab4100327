"""The files that a user copies: an environment and a reward of their own, and a Hugging Face model as the policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.runs import Run, balance, trained
from tests.end_to_end.tiny_model import Architecture, make_model
from tests.support.running import ROOT

MY_ENV = ROOT / "examples" / "my_env.yaml"
SMALL = ("train.groups_per_step=2", "train.group_size=4", "evaluation.episodes=2")


def train_in_my_env(directory: Path, engine: str, steps: int) -> None:
    """Receipts compare every tensor and a canary's log-probabilities at each version, so a run that ends has loaded,
    trained and synchronised the model that is there."""
    job = [str(MY_ENV), "policy.path=model", f"rollout.engine={engine}", *SMALL, f"train.steps={steps}"]
    ended = trained(directory, *job, timeout_s=240.0)
    assert (ended.status, ended.leftovers) == (0, []), ended
    run = Run.latest(directory)
    assert [step["version"] for step in run.steps()] == list(range(1, steps + 1))
    for step in run.steps():
        assert step["trajectories"] == 8
        assert 8 <= step["tokens"] <= 8 * 4 * 8  # at most 4 turns of at most 8 tokens
        assert step["staleness_max"] <= 1
        assert step["ratio_mean"] == pytest.approx(1.0, abs=0.05)
    for sample in run.samples():
        speaker, text = sample["transcript"][0]
        assert (speaker, text) == ("observation", "Guess a number from 1 to 9.")
        guesses = sum(speaker == "action" for speaker, _ in sample["transcript"])
        right = sample["transcript"][-1][1] == "Right!"
        assert sample["success"] == right
        if not sample["ticket"].startswith("e"):  # the return divided by the guesses, as my_env.py says
            assert sample["reward"] == pytest.approx(1.0 / guesses if right else 0.0)
    counts = balance(ended.stdout)
    assert counts["trained"] == steps * 8
    assert counts.pop("admitted") == sum(counts.values())


@pytest.mark.parametrize("engine", ["torch", pytest.param("vllm", marks=pytest.mark.deep)])
def test_a_users_own_environment_trains_a_hugging_face_model(tmp_path: Path, engine: str) -> None:
    make_model(tmp_path / "model")
    train_in_my_env(tmp_path, engine, steps=3)


@pytest.mark.parametrize(
    ("architecture", "tied", "engine"),
    [
        ("qwen3", False, "torch"),
        ("qwen2", True, "vllm"),
        ("llama", False, "torch"),
        *(
            pytest.param(architecture, tied, engine, marks=pytest.mark.deep)
            for architecture, tied, engine in [
                ("qwen3", False, "vllm"),
                ("qwen2", True, "torch"),
                ("qwen2", False, "torch"),
                ("qwen2", False, "vllm"),
                ("llama", True, "torch"),
                ("llama", True, "vllm"),
                ("llama", False, "vllm"),
            ]
        ),
    ],
)
def test_a_model_of_each_kind_trains_from_its_shards(
    tmp_path: Path, architecture: Architecture, tied: bool, engine: str
) -> None:
    model = make_model(tmp_path / "model", architecture, tied=tied, shard_size="100KB")
    assert len(list(model.glob("*.safetensors"))) > 1
    train_in_my_env(tmp_path, engine, steps=2)
