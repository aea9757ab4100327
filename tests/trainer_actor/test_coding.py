"""A trajectory comes back from its record: ids bit for bit, log-probabilities within the bound that is stated."""

from __future__ import annotations

import math
import zlib

import msgspec
import numpy as np
import pytest

from actors.trainer import coding
from actors.trainer.coding import LOGPROB_ERROR, NotCoded, decode, encode
from actors.trajectory import Segment, Trajectory
from bus.codec import dumps
from tests.trainer_actor.support import Sampled, trajectory

EXACT = ("tokens", "loss_mask", "versions", "allowed")


def with_segments(*segments: Segment) -> Trajectory:
    return msgspec.structs.replace(trajectory("t"), segments=list(segments))


def segment(
    *, tokens: object, mask: object, logprobs: object, versions: object | None = None, allowed: object | None = None
) -> Segment:
    sampled = np.array(mask, np.uint8)
    return Segment(
        tokens=np.array(tokens, np.int32),
        loss_mask=sampled,
        logprobs=np.array(logprobs, np.float32),
        versions=np.array(versions if versions is not None else np.where(sampled, 7, -1), np.int32),
        allowed=np.array(allowed if allowed is not None else np.full(sampled.size, -1), np.int32),
    )


def assert_same_but_for_logprobs(found: Trajectory, expected: Trajectory) -> None:
    for name in Trajectory.__struct_fields__:
        if name not in ("segments", "allowed_sets"):
            assert getattr(found, name) == getattr(expected, name), name
    for one, other in zip(found.allowed_sets, expected.allowed_sets, strict=True):
        assert (one.dtype, one.tolist()) == (other.dtype, other.tolist())
    for mine, theirs in zip(found.segments, expected.segments, strict=True):
        for name in EXACT:
            one, other = getattr(mine, name), getattr(theirs, name)
            assert (one.dtype, one.tolist()) == (other.dtype, other.tolist()), name
        assert mine.logprobs.dtype == np.float32


@pytest.mark.parametrize("seed", range(60))
def test_any_trajectory_comes_back_with_ratios_within_the_bound(seed: int) -> None:
    expected = Sampled("t", np.random.default_rng(seed)).trajectory
    found = decode(encode(expected))
    assert_same_but_for_logprobs(found, expected)
    for mine, theirs in zip(found.segments, expected.segments, strict=True):
        apart = np.abs(mine.logprobs.astype(np.float64) - theirs.logprobs.astype(np.float64))
        assert apart.max() <= 2.0**-16
        assert np.exp(apart).max() - 1 < 1.6e-5
        assert not mine.logprobs[mine.loss_mask == 0].any()


def test_what_was_read_back_is_written_and_read_again_without_a_change() -> None:
    for seed in range(20):
        first = decode(encode(Sampled("t", np.random.default_rng(seed)).trajectory))
        assert encode(decode(encode(first))) == encode(first)
        assert dumps(decode(encode(first))) == dumps(first)


def test_a_logprob_is_the_nearest_multiple_of_two_to_the_minus_fifteen() -> None:
    step = 2.0**-15
    given = [0.0, -0.4 * step, -0.6 * step, -1.0, -17.25, -255.9, 5e-5]
    found = decode(encode(with_segments(segment(tokens=[9] * 8, mask=[0] + [1] * 7, logprobs=[0, *given]))))
    expected = [0.0, 0.0, 0.0, -step, -1.0, -17.25, -round(255.9 * 32768) * step, 2 * step]  # 5e-5 is 1.64 steps
    assert found.segments[0].logprobs.tolist() == expected
    assert step / 2 == LOGPROB_ERROR


@pytest.mark.parametrize("odd", [math.nan, -math.inf, -256.0, -3e38])
def test_a_logprob_beyond_the_steps_keeps_its_record_exact(odd: float) -> None:
    given = segment(tokens=[1, 2, 3], mask=[0, 1, 1], logprobs=[0.0, odd, -0.123456789])
    found = decode(encode(with_segments(given))).segments[0]
    assert found.logprobs.tobytes() == given.logprobs.tobytes()


@pytest.mark.parametrize("odd", [-0.5, -0.0])
def test_a_logprob_of_a_token_that_was_not_sampled_keeps_its_record_exact(odd: float) -> None:
    given = segment(tokens=[1, 2, 3], mask=[0, 1, 0], logprobs=[odd, -0.123456789, 0.0])
    found = decode(encode(with_segments(given))).segments[0]
    assert found.logprobs.tobytes() == given.logprobs.tobytes()


@pytest.mark.parametrize("largest", [0, 255, 256, 65_535, 151_935, 2**24, 2**31 - 1, -1, -(2**31)])
def test_ids_of_any_vocabulary_are_exact(largest: int) -> None:
    given = segment(tokens=[0, largest, 7], mask=[0, 1, 1], logprobs=[0, -1, -2])
    assert decode(encode(with_segments(given))).segments[0].tokens.tolist() == [0, largest, 7]


def test_masks_versions_and_allowed_sets_that_change_at_every_token_are_exact() -> None:
    chance = np.random.default_rng(5)
    given = segment(
        tokens=chance.integers(0, 9, 99),
        mask=chance.integers(0, 2, 99),
        logprobs=np.zeros(99),
        versions=chance.integers(-(2**31), 2**31, 99),
        allowed=chance.integers(-(2**31), 2**31, 99),
    )
    assert_same_but_for_logprobs(decode(encode(with_segments(given))), with_segments(given))


def test_empty_segments_and_none_at_all_come_back() -> None:
    nothing = segment(tokens=[], mask=[], logprobs=[])
    for given in (with_segments(), with_segments(nothing), with_segments(nothing, trajectory("t").segments[0])):
        found = decode(encode(given))
        assert [each.tokens.size for each in found.segments] == [each.tokens.size for each in given.segments]
        assert_same_but_for_logprobs(found, given)


def test_arrays_that_come_back_are_writable_and_their_own() -> None:
    first, second = decode(encode(with_segments(*trajectory("t").segments * 2))).segments
    first.tokens[0] = 99
    assert second.tokens[0] == 10


def test_every_field_of_a_trajectory_is_in_its_record() -> None:
    assert {*coding._Head.__struct_fields__, "segments", "allowed_sets"} == {*Trajectory.__struct_fields__}


def test_damaged_bytes_are_refused_or_read_as_some_trajectory_but_nothing_else() -> None:
    chance = np.random.default_rng(11)
    record = encode(Sampled("t", chance).trajectory)
    refused = 0
    for _ in range(1000):
        damaged = bytearray(record)
        for place in chance.integers(0, len(record), chance.integers(1, 4)):
            damaged[place] = chance.integers(0, 256)
        damaged = damaged[: len(record) if chance.random() < 0.7 else int(chance.integers(0, len(record)))]
        try:
            assert isinstance(decode(bytes(damaged)), Trajectory)
        except NotCoded:
            refused += 1
    assert refused > 600


def test_a_record_that_claims_to_be_larger_than_it_is_takes_no_memory_for_it() -> None:
    size, body, noise = msgspec.msgpack.decode(encode(trajectory("t")))
    with pytest.raises(NotCoded, match=f"expected a body of {size + 1} bytes"):
        decode(msgspec.msgpack.encode([size + 1, body, noise]))
    with pytest.raises(NotCoded, match="a body of 1099511627776 bytes"):
        decode(msgspec.msgpack.encode([1 << 40, body, noise]))


def test_runs_that_do_not_add_up_are_refused() -> None:
    _, body, noise = msgspec.msgpack.decode(encode(trajectory("t")))
    parts = msgspec.msgpack.decode(zlib.decompress(body, -15))
    parts[4] = coding._packed(np.array([2**40, 1], np.int64))  # run lengths, of no memory either
    plain = msgspec.msgpack.encode(parts)
    with pytest.raises(NotCoded, match=r"3 tokens, segments of 3, runs of 1099511627777"):
        decode(msgspec.msgpack.encode([len(plain), zlib.compress(plain, wbits=-15), noise]))
