"""Slots of the embedded engine: who keeps what, and who gives way."""

from __future__ import annotations

import numpy as np

from actors.proxy.engines.torch_slots import SlotTable


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def hold(table: SlotTable, trajectory: str, *ids: int) -> int:
    """A turn that ends with these tokens in the slot."""
    place = table.acquire(trajectory, tokens(*ids, 0))
    assert place is not None
    slot, held = place
    table.extend(slot, tokens(*ids[held:]))
    table.release(slot, trajectory)
    return slot


def test_a_next_turn_finds_what_the_last_one_left() -> None:
    table = SlotTable(2, 16)
    slot = hold(table, "a", 1, 2, 3)
    assert table.acquire("a", tokens(1, 2, 3, 4, 5)) == (slot, 3)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    table = SlotTable(1, 16)
    slot = hold(table, "a", 1, 2, 3)
    assert table.acquire("a", tokens(1, 2, 3)) == (slot, 2)


def test_only_the_common_prefix_is_reused_and_what_follows_is_overwritten() -> None:
    table = SlotTable(1, 16)
    slot = hold(table, "a", 1, 2, 3, 4, 5)
    assert table.acquire("a", tokens(1, 2, 9, 4, 5, 6)) == (slot, 2)
    table.extend(slot, tokens(9, 4))
    table.release(slot, "a")
    assert table.acquire("a", tokens(1, 2, 9, 4, 5, 6)) == (slot, 4)


def test_another_trajectory_starts_empty_in_a_slot_given_up() -> None:
    table = SlotTable(1, 16)
    slot = hold(table, "a", 1, 2, 3)
    assert table.acquire("b", tokens(1, 2, 3, 4)) == (slot, 0)


def test_the_least_recently_used_gives_way() -> None:
    table = SlotTable(2, 16)
    slot_a = hold(table, "a", 1, 2)
    slot_b = hold(table, "b", 3, 4)
    assert hold(table, "a", 1, 2, 5) == slot_a
    assert hold(table, "c", 6) == slot_b
    assert table.acquire("a", tokens(1, 2, 5, 7)) == (slot_a, 3)


def test_a_busy_slot_never_gives_way() -> None:
    table = SlotTable(1, 16)
    assert table.acquire("a", tokens(1)) == (0, 0)
    assert table.acquire("b", tokens(1)) is None
    assert table.acquire("a", tokens(1)) is None


def test_a_forgotten_slot_is_free_before_any_kept_one_is_evicted() -> None:
    table = SlotTable(2, 16)
    slot_a = hold(table, "a", 1, 2)
    slot_b = hold(table, "b", 3, 4)
    table.forget("b")
    table.forget("never seen")
    assert hold(table, "c", 5) == slot_b
    assert table.acquire("a", tokens(1, 2, 3)) == (slot_a, 2)


def test_of_two_requests_of_one_trajectory_the_later_one_is_kept() -> None:
    table = SlotTable(2, 16)
    first = table.acquire("a", tokens(1, 2))
    second = table.acquire("a", tokens(1, 3))
    assert first is not None
    assert second is not None
    table.extend(second[0], tokens(1, 3))
    table.release(first[0], "a")
    table.release(second[0], "a")
    assert table.acquire("a", tokens(1, 3, 4)) == (second[0], 2)
    assert table.acquire("b", tokens(1)) == (first[0], 0)


def test_after_new_weights_nothing_is_reused_and_busy_slots_stay_busy() -> None:
    table = SlotTable(2, 16)
    kept = hold(table, "a", 1, 2)
    busy = table.acquire("b", tokens(3, 4))
    assert busy is not None
    table.extend(busy[0], tokens(3, 4))
    table.invalidate()
    assert table.acquire("a", tokens(1, 2, 3)) == (kept, 0)
    assert table.acquire("c", tokens(1)) is None
    table.extend(busy[0], tokens(3, 4, 5))
    table.release(busy[0], "b")
    assert table.acquire("b", tokens(3, 4, 5, 6)) == (busy[0], 3)


def test_the_longest_beginning_is_found_in_any_slot_and_not_beyond_what_it_holds() -> None:
    table = SlotTable(4, 16)
    hold(table, "a", 1, 2, 3)
    hold(table, "b", 1, 2, 9, 4)
    longest = hold(table, "c", 1, 2, 3, 4)
    table.forget("c")
    assert table.longest_prefix(tokens(1, 2, 3, 4, 0, 0)) == (longest, 4)  # a slot that was never filled reads 0
    assert table.longest_prefix(tokens(8, 2, 3))[1] == 0
    table.invalidate()
    assert table.longest_prefix(tokens(1, 2, 3))[1] == 0


def test_a_slot_given_the_beginning_of_another_holds_that_alone() -> None:
    table = SlotTable(2, 16)
    hold(table, "a", 1, 2, 3)
    place = table.acquire("b", tokens(1, 2, 5))
    assert place is not None
    table.copied(place[0], tokens(1, 2))
    table.extend(place[0], tokens(5))
    table.release(place[0], "b")
    assert table.acquire("b", tokens(1, 2, 5, 7)) == (place[0], 3)


def test_several_slots_grow_by_a_token_each() -> None:
    table = SlotTable(4, 16)
    slots = [hold(table, name, *ids) for name, ids in (("a", (1, 2)), ("b", (3,)), ("c", (4, 5, 6)))]
    table.extend_each(np.array([slots[2], slots[0]]), tokens(7, 8))
    assert table.acquire("a", tokens(1, 2, 8, 0)) == (slots[0], 3)
    assert table.acquire("b", tokens(3, 7, 0)) == (slots[1], 1)
    assert table.acquire("c", tokens(4, 5, 6, 7, 0)) == (slots[2], 4)


def test_slots_are_given_out_lowest_first() -> None:
    table = SlotTable(4, 16)
    for name in "abcd":
        hold(table, name, 1)
    for name in "cab":
        table.forget(name)
    assert [hold(table, name, 1) for name in "efg"] == [0, 1, 2]
