"""The memory of a simulated engine: who gives way to whom, counted by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.proxy.engines.simulated_cache import SimulatedCache


def test_a_kept_prefix_is_not_computed_again_but_for_its_last_token() -> None:
    cache = SimulatedCache(100)
    assert cache.enter("a", 30) == 0
    cache.leave("a", 30, computed=30)
    assert cache.known("a") == 30
    assert cache.enter("a", 45) == 30
    cache.leave("a", 45, computed=45)
    assert cache.enter("a", 45) == 44


def test_the_least_recently_used_prefix_gives_way_from_its_end() -> None:
    cache = SimulatedCache(100)
    for name in ("a", "b"):
        cache.enter(name, 40)
        cache.leave(name, 40, computed=40)
    cache.enter("c", 30)  # 110: ten tokens of a, which was used before b
    assert (cache.known("a"), cache.known("b"), cache.evicted) == (30, 40, 10)
    cache.grow(35)  # the rest of a, and five of b
    assert (cache.known("a"), cache.known("b"), cache.evicted) == (0, 35, 45)
    assert cache.room == 35


def test_what_runs_is_kept_even_where_it_is_longer_than_the_memory() -> None:
    cache = SimulatedCache(100)
    cache.enter("a", 90)
    cache.grow(20)
    assert (cache.running, cache.room) == (110, -10)
    cache.leave("a", 110, computed=110)
    assert cache.known("a") == 100  # what fits of it


def test_new_weights_leave_no_prefix() -> None:
    cache = SimulatedCache(100)
    cache.enter("a", 30)
    cache.leave("a", 30, computed=30)
    cache.clear()
    assert cache.enter("a", 31) == 0


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 60), st.integers(0, 60)), max_size=60))
def test_memory_is_never_exceeded_by_prefixes_and_no_token_is_counted_twice(
    turns: list[tuple[str, int, int]],
) -> None:
    cache = SimulatedCache(100)
    for name, length, growth in turns:
        before = cache.known(name)
        assert cache.enter(name, length) == min(before, length - 1)
        cache.grow(growth)
        kept = sum(map(cache.known, "abcd"))
        assert kept <= max(0, cache.capacity - cache.running)
        cache.leave(name, length + growth, computed=length + growth)
        assert cache.running == 0
        assert sum(map(cache.known, "abcd")) <= cache.capacity
