"""Who has a place at a simulated engine, with a memory that is too small; counted by hand."""

from __future__ import annotations

import numpy as np

from actors.core import Ref
from actors.proxy.engines.protocol import GenerateRequest
from actors.proxy.engines.simulated_batch import PREFILL_TOKENS, SimulatedBatch
from actors.proxy.engines.simulated_cache import SimulatedCache
from actors.proxy.engines.simulated_row import Row
from bus.message import NodeAddress

ANYBODY = Ref(NodeAddress("somebody", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", 1), "asker")


def add(batch: SimulatedBatch, name: str, prompt: int, sampled: int, *, urgent: bool = False) -> Row:
    request = GenerateRequest(name, name, np.zeros(prompt, np.int32), sampled, urgent=urgent)
    row = batch.waiting[name] = Row(request, ANYBODY, 0)
    return row


def test_what_outgrows_the_memory_gives_its_place_back_and_goes_on_with_its_tokens() -> None:
    batch = SimulatedBatch(8, SimulatedCache(100))
    a, b = add(batch, "a", 40, 30), add(batch, "b", 40, 30)
    batch.admit(lambda row: True)
    assert batch.sampled(batch.prefills(), 1, 0) == []  # 41 + 41 of 100
    assert batch.steps() == 9  # 18 tokens of room for two
    assert batch.sampled([a, b], 9, 0) == []
    assert batch.steps() == 20  # b, which began last, has given way, and a has 20 to go
    assert (list(batch.decoding), list(batch.waiting), batch.preempted) == (["a"], ["b"], 1)
    assert batch.sampled([a], 20, 0) == [a]
    batch.admit(lambda row: True)
    assert len(b.sampled) == 10
    assert b.missing == 20  # of 50: when a was 70 tokens long, 30 were left to b's prefix
    assert batch.sampled(batch.prefills(), 1, 0) == []
    assert batch.steps() == 19
    assert batch.sampled([b], 19, 0) == [b]
    assert (batch.cache.running, batch.here()) == (0, {})


def test_places_are_given_to_urgent_ones_first_and_no_more_than_there_are() -> None:
    batch = SimulatedBatch(2, SimulatedCache(1000))
    for name in ("a", "b"):
        add(batch, name, 10, 5)
    add(batch, "c", 10, 5, urgent=True)
    batch.admit(lambda row: True)
    assert (list(batch.fresh), list(batch.waiting)) == (["c", "a"], ["b"])


def test_one_that_does_not_fit_holds_up_those_behind_it() -> None:
    batch = SimulatedBatch(8, SimulatedCache(100))
    for name, prompt in (("a", 50), ("b", 60), ("c", 10)):
        add(batch, name, prompt, 5)
    batch.admit(lambda row: True)
    assert (list(batch.fresh), list(batch.waiting)) == (["a"], ["b", "c"])


def test_a_prefill_step_takes_prompts_together_up_to_its_bound() -> None:
    batch = SimulatedBatch(8, SimulatedCache(10 * PREFILL_TOKENS))
    rows = [add(batch, str(number), PREFILL_TOKENS // 2, 5) for number in range(3)]
    batch.admit(lambda row: True)
    assert batch.prefills() == rows[:2]


def test_other_weights_have_all_computed_anew() -> None:
    batch = SimulatedBatch(8, SimulatedCache(100))
    row = add(batch, "a", 40, 30)
    batch.admit(lambda row: True)
    batch.sampled([row], 5, 0)
    batch.begin_anew()
    assert (list(batch.fresh), row.missing, batch.cache.running) == (["a"], 45, 45)
