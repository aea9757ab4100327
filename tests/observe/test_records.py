"""Records keep valid JSON and come back as they were written."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from coordinator.observe.records import EvalRecord, StepRecord, decode_metric, moving_average
from tests.observe.samples import evaluation, step


def test_a_step_comes_back_as_it_was_written() -> None:
    record = step(12)
    assert decode_metric(msgspec.json.encode(record)) == record


def test_an_evaluation_is_told_apart_from_a_step() -> None:
    record = evaluation(5)
    assert decode_metric(msgspec.json.encode(record)) == record
    assert json.loads(msgspec.json.encode(record))["record"] == "evaluation"


def test_numbers_that_are_not_finite_become_null_and_come_back_as_nan() -> None:
    line = msgspec.json.encode(step(1, loss=math.nan, grad_norm=math.inf, seconds={"train": math.nan, "publish": 0.5}))

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    plain = json.loads(line, parse_constant=refuse)
    assert (plain["loss"], plain["grad_norm"], plain["seconds"]) == (None, None, {"train": None, "publish": 0.5})
    back = decode_metric(line)
    assert isinstance(back, StepRecord)
    assert math.isnan(back.loss)
    assert math.isnan(back.grad_norm)
    assert math.isnan(back.seconds["train"])
    assert back.reward_mean == 0.42


def test_a_record_of_a_later_release_with_more_fields_is_still_read() -> None:
    line = json.dumps({"record": "evaluation", "version": 1, "episodes": 2, "success": 0.5, "return_mean": 1.0,
                       "turns_mean": 3.0, "colour": "blue"}).encode()  # fmt: skip
    assert decode_metric(line) == EvalRecord(version=1, episodes=2, success=0.5, return_mean=1.0, turns_mean=3.0)


def test_a_line_without_a_needed_field_is_refused_by_name() -> None:
    with pytest.raises(msgspec.ValidationError, match="episodes"):
        decode_metric(b'{"record": "evaluation", "version": 1}')


def test_the_moving_average_weighs_the_newest_value_with_one_fifth() -> None:
    first = moving_average(None, 1.0)
    second = moving_average(first, 0.0)
    third = moving_average(second, 0.5)
    assert [first, second, third] == pytest.approx([1.0, 0.8, 0.74])


def test_the_moving_average_survives_values_that_are_not_finite() -> None:
    assert moving_average(0.5, math.nan) == 0.5
    assert moving_average(math.nan, 0.25) == 0.25
