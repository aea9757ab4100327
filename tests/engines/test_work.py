"""What an engine says that it computed, and in which time."""

from __future__ import annotations

from actors.proxy.engines.work import WorkMeter
from hwprobe.fitting import Work


def test_what_was_counted_is_taken_once() -> None:
    meter = WorkMeter()
    meter.prefilled(100)
    meter.step(0.5)
    meter.decoded(4, 420)
    meter.step(0.25)
    assert meter.take() == Work(busy_s=0.75, prefill_tokens=100, steps=1, decode_tokens=4, context_tokens=420)
    assert meter.take() is None


def test_a_prompt_in_parts_takes_the_time_of_all_of_them() -> None:
    """Three steps, and the engine counts the tokens in the last one; reports are taken in between."""
    meter = WorkMeter()
    meter.step(0.5)
    meter.step(0.5)
    assert meter.take() is None
    meter.prefilled(3000)
    meter.step(0.25)
    assert meter.take() == Work(busy_s=1.25, prefill_tokens=3000)
    meter.decoded(1, 3001)
    meter.step(0.125)
    assert meter.take() == Work(busy_s=0.125, steps=1, decode_tokens=1, context_tokens=3001)


def test_the_time_of_a_prompt_that_was_aborted_is_nobody_elses() -> None:
    meter = WorkMeter()
    meter.step(5.0)
    meter.rest()
    meter.prefilled(100)
    meter.step(0.5)
    assert meter.take() == Work(busy_s=0.5, prefill_tokens=100)
