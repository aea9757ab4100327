"""The planner against figures worked out by hand, and against every candidate played on virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.commands import plan
from coordinator.resources.mix import Candidate, Mix, MixError, convert_mix, load_mix, training_s
from coordinator.resources.planner import NoPlan, candidates, costs_of, expect, recommend
from coordinator.resources.simulation import simulate
from hwprobe.cost import ModelSize, device_cost, model_size
from tests.support.running import ROOT

GAMES = {"turns": 12, "prompt": 1500, "observation": 600, "response": 40, "step_s": 0.4}
MATH = {"turns": 1, "prompt": 300, "response": 2500}
SOFTWARE = {"turns": 20, "prompt": 4000, "observation": 500, "response": 150, "reset_s": 20, "step_s": 0.3}
MIXES: dict[str, dict[str, Any]] = {
    "games": {"games": GAMES},
    "mathematics": {"math": MATH},
    "mixed": {"games": {**GAMES, "weight": 2}, "math": {**MATH, "weight": 2}, "software": SOFTWARE},
}


def mix(name: str, **more: Any) -> Mix:
    return convert_mix({"in_flight": 64, "tasks": MIXES[name], **more}, name)


def test_what_engines_were_measured_to_reach_says_nothing_of_training() -> None:
    """12 + 11 x 0.6 + 12 x 0.04 thousand tokens of games, three times two FLOP a parameter, on two H800."""
    known, measured = mix("games"), mix("games", efficiency={"H800": {"compute": 0.01, "bandwidth": 0.9}})
    candidate = Candidate((("H20", 2),), (("H800", 2),))
    tokens = 1500 + 11 * 600 + 12 * 40
    flops = 0.8 * 148e12 * 3.2  # the brief's: prefill 3.2 times as fast as on an H20
    assert training_s(known, candidate) == pytest.approx(6 * 8.2e9 * tokens / (2 * flops))
    assert training_s(measured, candidate) == training_s(known, candidate)
    gpus = candidates(known, costs_of(known), gpus=4)
    assert set(candidates(measured, costs_of(measured), gpus=4)) == set(gpus)


# ---- what a request costs -------------------------------------------------------------------------------------------


def test_the_classes_stand_to_each_other_as_the_brief_has_measured() -> None:
    """Qwen3-32B: prefill on H800 3.2 times as fast as on H20; decoding on H20 1.41 times as fast as on H800."""
    model = ModelSize(parameters=32.8e9, layers=64, kv_heads=8, head_dim=128)
    h800, h20 = device_cost("H800", model), device_cost("H20", model)
    per_device = h20.prefill_s(model, 1000) * h20.devices / (h800.prefill_s(model, 1000) * h800.devices)
    assert per_device == pytest.approx(3.2, rel=1e-6)
    decode = h800.step_s(model, 8, 4000) * h800.devices / (h20.step_s(model, 8, 4000) * h20.devices)
    assert decode == pytest.approx(1.41, rel=1e-6)


def test_a_step_reads_the_weights_once_and_every_cache() -> None:
    """Qwen3-8B on an H20: 16.4 GB of weights, 2 x 36 x 8 x 128 x 2 = 147,456 bytes a token, 3.2 of 4.0 TB/s."""
    model = ModelSize()
    h20 = device_cost("H20", model)
    assert model.cache_bytes == 147_456
    assert h20.step_s(model, 10, 2000) == pytest.approx((16.4e9 + 10 * 2000 * 147_456) / 3.2e12)
    assert h20.prefill_s(model, 1000) == pytest.approx(2 * 8.2e9 * 1000 / (0.8 * 148e12))
    # 96 GiB less 15% and the weights, by 2000 tokens of cache
    assert h20.places(model, 2000, 1000) == int((96 * 2**30 * 0.85 - 16.4e9) / (2000 * 147_456))
    assert h20.places(model, 2000, 128) == 128


def test_a_model_takes_as_many_devices_as_it_needs() -> None:
    large = ModelSize(parameters=32.8e9, layers=64)  # 65.6 GB
    assert device_cost("H20", large).devices == 1  # of 96 GiB three quarters hold it
    assert device_cost("H20", large, memory_gib=48).devices == 2  # the brief's H20
    assert device_cost("H800", large).devices == 2
    with pytest.raises(ValueError, match=r"466 GiB of weights fit no engine of up to 8 devices with 48 GiB each"):
        device_cost("H20", ModelSize(parameters=250e9), memory_gib=48)
    with pytest.raises(ValueError, match="hardware class H999: no figures"):
        device_cost("H999", large)


def test_a_models_size_is_that_of_its_config() -> None:
    """SmolLM2-135M has 134.5 million parameters, Qwen3-8B 8.19 billion (their model cards)."""
    smollm2 = {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    }
    qwen3 = {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
    }
    assert model_size(smollm2).parameters == pytest.approx(134.5e6, rel=0.001)
    assert model_size(qwen3).parameters == pytest.approx(8.19e9, rel=0.001)
    assert model_size(qwen3).cache_bytes == 147_456


# ---- what is expected -----------------------------------------------------------------------------------------------


def test_a_lone_engine_decodes_at_its_steps_pace() -> None:
    """One H20, 10 answers of 1000 tokens at once, nothing else: 10 / (1000 steps) with the caches half full."""
    alone = convert_mix(
        {"in_flight": 10, "train": False, "tasks": {"t": {"turns": 1, "prompt": 1, "response": 1000}}}, "alone"
    )
    candidate = Candidate((("H20", 1),))
    step_s = (16.4e9 + 10 * 501 * 147_456) / 3.2e12
    assert expect(alone, candidate, costs_of(alone)).rate == pytest.approx(10 / (1000 * step_s), rel=0.01)
    assert simulate(alone, candidate, costs_of(alone), games=200).rate == pytest.approx(10 / (1000 * step_s), rel=0.05)


def test_an_environment_that_is_slow_leaves_devices_idle() -> None:
    """100 trajectories of 100 s each: one a second, whatever the devices; each takes an H800 2.8 ms."""
    slow = convert_mix(
        {"in_flight": 100, "train": False, "tasks": {"t": {"prompt": 1, "response": 1, "step_s": 100}}}, "slow"
    )
    candidate = Candidate((("H800", 4),))
    expected, played = (
        expect(slow, candidate, costs_of(slow)),
        simulate(slow, candidate, costs_of(slow), games=1000),
    )
    assert expected.rate == pytest.approx(1.0, rel=0.02)
    assert played.rate == pytest.approx(1.0, rel=0.1)
    assert expected.utilisation < 0.01
    assert played.utilisation < 0.01
    assert expected.bound == "trajectories in flight (100)"


def test_every_division_of_the_devices_is_a_candidate() -> None:
    """3 devices with training on the faster class: H800 3 (1 or 2 train), 2 and 1 (1 or 2), 1 and 2; H20 3 (1 or 2)."""
    found = set(candidates(mix("mixed"), costs_of(mix("mixed")), gpus=3))
    assert found == {
        Candidate((("H20", 2),), (("H20", 1),)),
        Candidate((("H20", 1),), (("H20", 2),)),
        Candidate((("H20", 2),), (("H800", 1),)),
        Candidate((("H800", 1), ("H20", 1)), (("H800", 1),)),
        Candidate((("H20", 1),), (("H800", 2),)),
        Candidate((("H800", 2),), (("H800", 1),)),
        Candidate((("H800", 1),), (("H800", 2),)),
    }


def test_a_budget_is_spent_and_not_exceeded() -> None:
    """10 buys 10 H20, or 1 H800 and 7, 2 and 4, 3 and 1 (2.85 each)."""
    without = mix("mixed", train=False)
    found = {(c.devices("H800"), c.devices("H20")) for c in candidates(without, costs_of(without), budget=10.0)}
    assert found == {(0, 10), (1, 7), (2, 4), (3, 1)}


@pytest.mark.parametrize("name", MIXES)
def test_the_recommendation_is_within_five_percent_of_the_best_that_can_be_played(name: str) -> None:
    check_against_all(name, gpus=5, games=400)


@pytest.mark.deep
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", MIXES)
def test_so_it_is_on_more_devices_and_without_training(name: str, train: bool) -> None:
    check_against_all(name, gpus=8, games=1000, train=train)


def check_against_all(name: str, *, gpus: int, games: int, train: bool = True) -> None:
    """Every candidate is played by another seed than the planner's, and longer."""
    tasks = mix(name, train=train)
    costs = costs_of(tasks)
    plan_ = recommend(tasks, gpus=gpus)
    played = {c: simulate(tasks, c, costs, games=games, seed=1) for c in candidates(tasks, costs, gpus=gpus)}
    chosen = played[plan_.best.candidate]
    best = max(played, key=lambda candidate: played[candidate].rate)
    assert chosen.rate >= 0.95 * played[best].rate, (plan_.best.candidate, best, chosen, played[best])
    assert plan_.played.utilisation == pytest.approx(chosen.utilisation, abs=0.05)
    assert plan_.best.utilisation == pytest.approx(chosen.utilisation, abs=0.12)  # worked out, without chance


def test_prefill_goes_to_compute_and_decoding_to_bandwidth() -> None:
    games, math = (recommend(mix(name, train=False), gpus=4).best for name in ("games", "mathematics"))
    assert games.candidate == Candidate((("H800", 4),))
    assert math.candidate == Candidate((("H20", 4),))


def test_a_directory_that_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([str(tmp_path), "--gpus", "4"]) == 2
    assert f"error: {tmp_path}: cannot be read as a run: " in capsys.readouterr().err


def test_what_cannot_be_built_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(NoPlan, match=r"1 devices: not enough for one engine and one trainer"):
        recommend(mix("mixed"), gpus=1)
    with pytest.raises(MixError, match=r"unknown field `prompts` - at `\$\.tasks\[\.\.\.\]`"):
        convert_mix({"tasks": {"t": {"prompts": 1}}}, "m")
    with pytest.raises(MixError, match="cannot be read"):
        load_mix(tmp_path / "none.yaml")


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_expects_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    example = str(ROOT / "examples" / "mix.yaml")
    assert plan.main([example, "--gpus", "4"]) == 0
    table, _, why = capsys.readouterr().out.partition("\n\n")
    assert table.splitlines()[0].split()[:4] == ["H800", "H20", "TRAINING", "COST"]
    assert table.splitlines()[1].endswith("<- recommended")
    assert "at a utilisation of" in why
    assert "games: 8100 tokens to prefill, 480 to decode" in why
    assert plan.main([example, "--gpus", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert sum(document["recommended"]["devices"].values()) == 4
    assert 0 < document["expected_utilisation"] <= 1
    assert plan.main([str(ROOT / "examples" / "frozenlake.yaml"), "--gpus", "4"]) == 2
