"""Values that can never work are refused by name, before anything looks at them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from coordinator.job import JobError, convert, load
from coordinator.resources.resolve import resolve
from hwprobe import build_affinity_map, probe


@pytest.mark.parametrize(
    "override",
    [
        "seed=-1",
        "policy.shape.layers=0",
        "policy.shape.head_dim=31",
        "policy.shape.kv_heads=3",
        "environment.max_turns=0",
        "environment.workers=0",
        "environment.concurrent=-4",
        "environment.step_timeout_s=.inf",
        "reward.workers=0",
        "rollout.engines=0",
        "rollout.max_sequences=0",
        "rollout.temperature=.nan",
        "rollout.turn_timeout_s=0",
        "rollout.load_every_s=0",
        "train.threads=0",
        "train.steps=0",
        "train.groups_per_step=0",
        "train.group_size=1",
        "train.learning_rate=.inf",
        "train.adam_beta2=1",
        "train.warmup_steps=-1",
        "train.tis_cap=0",
        "train.length=0",
        "train.clip_low=1.5",
        "train.reference=/no/such/model",
        "train.tensor_parallel=2",  # the backend is torch
        "train.pipeline_parallel=2",
        "train.data_parallel=2",
        "train.data_parallel=0",
        "train.sequence_parallel=true",
        "train.distributed_optimizer=true",
        "scheduling.alpha=-1",
        "scheduling.redundant_groups=-1",
        "evaluation.episodes=-1",
        "checkpoint.keep=0",
        "coordinator.silence_s=0",
        "coordinator.store=zk://",
    ],
)
def test_an_impossible_value_is_refused_by_name(override: str) -> None:
    with pytest.raises(JobError) as refused:
        convert({}, "job.yaml", [override])
    assert str(refused.value).startswith(f"{override.partition('=')[0]}: ")


@pytest.mark.parametrize("override", ["train.steps", "=3", "name.first=x", "train.steps=[1"])
def test_a_malformed_override_is_quoted(override: str) -> None:
    with pytest.raises(JobError) as refused:
        convert({"name": "lake"}, "job.yaml", [override])
    assert str(refused.value).startswith(f"override {override!r}: ")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["train.backend=megatron", "train.tensor_parallel=4"], "train.tensor_parallel"),  # 2 key-value heads
        (["train.backend=megatron", "train.pipeline_parallel=2"], "train.pipeline_parallel"),  # 3 layers
        (
            ["train.backend=megatron", "train.pipeline_parallel=3", "train.virtual_pipeline=2"],
            "train.virtual_pipeline",
        ),
        (["rollout.max_model_len=2048"], "rollout.max_model_len"),  # 2,048 positions: one is kept for scoring
        (["rollout.max_model_len=1"], "rollout.max_model_len"),
    ],
)
def test_what_does_not_fit_the_policy_is_refused_by_name(overrides: list[str], key: str) -> None:
    job = convert(yaml.safe_load("{}"), "job.yaml", [*overrides, "rollout.engine=torch"])
    with pytest.raises(JobError) as refused:
        resolve(job, build_affinity_map(probe()))
    assert str(refused.value).startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.algorithm=ppo", "train.backend=megatron"], "train.estimator: gae (of ppo) needs a critic"),
        (["train.algorithm=ppo", "train.critic=nowhere"], "train.critic: expected initial or a model directory"),
        (["train.algorithm=topr", "train.correction=tis"], "train.correction: topr's loss"),
        (["train.backend=megatron", "train.virtual_pipeline=2"], "train.virtual_pipeline: chunks are of stages"),
        (["train.backend=megatron", "train.sequence_parallel=true"], "train.sequence_parallel: cuts over tensor ranks"),
        (["train.backend=megatron", "train.distributed_optimizer=true"], "train.distributed_optimizer: is shared by"),
        (["train.kl_coefficient=0.1"], "train.reference: grpo compares with a reference"),
        (["train.algorithms={sums: cispo}"], "train.algorithms.sums: expected a stream of scheduling.mix (none)"),
        (["train.algorithm=reinforce"], "job.yaml: Invalid enum value 'reinforce' - at `$.train.algorithm`"),
    ],
)
def test_parts_that_contradict_each_other_are_refused_by_their_key(overrides: list[str], message: str) -> None:
    with pytest.raises(JobError) as refused:
        convert({}, "job.yaml", overrides)
    assert str(refused.value).startswith(message)


def test_every_rank_of_a_mesh_has_a_place_and_the_layout_is_told() -> None:
    mesh = ["train.tensor_parallel=2", "train.pipeline_parallel=3", "train.sequence_parallel=true"]
    job = convert({}, "job.yaml", ["rollout.engine=torch", "train.backend=megatron", *mesh])
    _, placement = resolve(job, build_affinity_map(probe()))
    assert [place.name for place in placement.of("trainer")] == [f"trainer-{rank}" for rank in range(6)]
    layout = "6 trainer ranks, neighbours first: 2 tensor x 1 data x 3 pipeline (stages of 1 layers), sequence parallel"
    assert layout in placement.notes


def test_the_length_of_a_trajectory_follows_from_turns_and_tokens() -> None:
    overrides = ["environment.max_turns=12", "rollout.max_tokens_per_turn=3", "rollout.engine=torch"]
    resolved, _ = resolve(convert({}, "job.yaml", overrides), build_affinity_map(probe()))
    assert resolved.train.length == 36


def test_numbers_in_scientific_notation_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("train: {learning_rate: 1e-5}\n")
    assert load(path, []).train.learning_rate == 1e-5
    assert load(path, ["train.learning_rate=2E-4"]).train.learning_rate == 2e-4
    assert load(path, ["name=1e-5x"]).name == "1e-5x"
