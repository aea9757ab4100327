"""The embedded engine's sampler and the numbers it draws with."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from actors.proxy.engines.seeds import derive, mix, uniforms
from actors.proxy.engines.torch_sampling import RowSampling, Sampler


def test_the_numbers_are_splitmix64() -> None:
    # The first two outputs of SplitMix64 for the state 0, as published with its reference implementation.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert [int(x) for x in mix(np.zeros(2, dtype=np.uint64), np.arange(2))] == expected


def test_a_derived_seed_fits_a_signed_64_bit_integer() -> None:
    assert derive(0, 0) == 0xE220A8397B1DCDAF >> 1
    assert derive(2**64, 0) == derive(0, 0)


def test_uniforms_lie_in_the_unit_interval_and_fill_it_evenly() -> None:
    drawn = np.concatenate([uniforms(np.arange(2000, dtype=np.uint64), np.full(2000, i)) for i in range(10)])
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.histogram(drawn, bins=16, range=(0, 1))[0]
    assert float(((counts - 1250) ** 2 / 1250).sum()) < 37.7  # 99.9th percentile for 15 degrees of freedom


def test_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    grid = np.stack([uniforms(np.arange(500, dtype=np.uint64), np.full(500, i)) for i in range(500)])
    for left, right in ((grid[:, 1:], grid[:, :-1]), (grid[1:], grid[:-1])):
        assert abs(float(np.corrcoef(left.ravel(), right.ravel())[0, 1])) < 0.01


def rows(count: int, temperature: float = 1.0, allowed: tuple[int, ...] | None = None) -> list[RowSampling]:
    return [RowSampling(temperature, allowed, seed, 0) for seed in range(count)]


def test_frequencies_follow_temperature_and_mask() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, 5.0])
    tokens, logprobs, _ = Sampler(torch.device("cpu")).draws(rows(8000, 2.0, (0, 1, 2)))(logits.repeat(8000, 1))
    weights = [math.exp(1.0), math.exp(0.0), math.exp(0.5)]
    for token, weight in enumerate(weights):
        probability = weight / sum(weights)
        assert abs((tokens == token).mean() - probability) < 4 * math.sqrt(probability * (1 - probability) / 8000)
        np.testing.assert_allclose(logprobs[tokens == token], math.log(probability), atol=1e-6)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    tokens, _, _ = Sampler(torch.device("cpu")).draws(rows(4000))(logits.repeat(4000, 1))
    assert set(tokens.tolist()) == {1, 3}


@pytest.mark.parametrize("vocabulary", [511, 512, 700, 4096, 49_100])
def test_a_draw_is_the_inversion_of_the_cumulated_distribution_whatever_the_vocabulary(vocabulary: int) -> None:
    chance = np.random.default_rng(vocabulary)
    logits = chance.normal(0, 3, (64, vocabulary)).astype(np.float32)
    logits[:, chance.random(vocabulary) < 0.5] = -np.inf
    how = rows(64)
    tokens, _, _ = Sampler(torch.device("cpu")).draws(how)(torch.from_numpy(logits))
    points = uniforms(np.arange(64, dtype=np.uint64), np.zeros(64))
    for row, token, point in zip(logits.astype(np.float64), tokens, points, strict=True):
        weights = np.exp(row - row.max())
        cumulated = np.cumsum(weights / weights.sum())
        assert weights[token] > 0
        assert cumulated[token] - weights[token] / weights.sum() - 1e-6 <= point <= cumulated[token] + 1e-6


def test_a_greedy_row_among_sampled_ones_takes_the_best_at_temperature_one() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]]).repeat(3, 1)
    how = [RowSampling(1.0, None, 1, 0), RowSampling(0.0, None, 1, 0), RowSampling(0.0, (0, 2), 1, 0)]
    tokens, logprobs, _ = Sampler(torch.device("cpu")).draws(how)(logits)
    assert tokens[1:].tolist() == [1, 2]
    total = math.exp(1) + math.exp(3) + math.exp(2)
    assert math.isclose(logprobs[1], 3 - math.log(total), abs_tol=1e-6)
    assert math.isclose(logprobs[2], 2 - math.log(math.exp(1) + math.exp(2)), abs_tol=1e-6)


def test_a_row_draws_the_same_whatever_stands_beside_it() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 50, generator=generator)
    sampler = Sampler(torch.device("cpu"))
    how = [RowSampling(0.5 + i / 64, None if i % 3 else tuple(range(i % 7, 50, 3)), i, i) for i in range(64)]
    together, _, _ = sampler.draws(how)(logits)
    alone = [int(sampler.draws([how[i]])(logits[i : i + 1])[0][0]) for i in range(64)]
    assert together.tolist() == alone


def test_the_order_and_repetition_of_allowed_ids_do_not_matter() -> None:
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(torch.device("cpu"))
    results = [sampler.draws([RowSampling(1.0, ids, 9, 4)])(logits) for ids in ((3, 7, 11), (11, 3, 7, 3))]
    assert results[0][0].tolist() == results[1][0].tolist()
    assert results[0][1].tolist() == results[1][1].tolist()


def test_draws_that_are_repeated_are_those_of_the_positions_that_follow() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    sampler = Sampler(torch.device("cpu"))
    start = [RowSampling(1.0, None, seed, seed) for seed in range(3)]
    draws = sampler.draws(start)
    repeated = [draws(logits)[0].tolist() for _ in range(40)]
    one_by_one = [
        sampler.draws([RowSampling(1.0, None, row.seed, row.position + step) for row in start])(logits)[0].tolist()
        for step in range(40)
    ]
    assert repeated == one_by_one
    assert len({tuple(tokens) for tokens in repeated}) > 30
