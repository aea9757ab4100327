"""The checker itself: histories made by hand, and all orders of small ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.metadata.histories import UNKNOWN, Answer, Call, State, is_linearizable, step

DONE = Answer("done")


def get(begin: float, end: float, state: State) -> Call:
    return Call("get", begin, end, Answer("done", state))


def create(begin: float, end: float, value: bytes, answer: Answer = DONE) -> Call:
    return Call("create", begin, end, answer, value)


def write(begin: float, end: float, value: bytes, answer: Answer | int, expected: int | None = None) -> Call:
    found = Answer("done", version=answer) if isinstance(answer, int) else answer
    return Call("write", begin, end, found, value, expected)


MADE = create(0, 1, b"a")
GOOD = {
    "nothing": [],
    "one after another": [MADE, write(2, 3, b"b", 1), get(4, 5, (b"b", 1))],
    "a read beside a write sees either": [MADE, write(2, 5, b"b", 1), get(3, 4, (b"a", 0)), get(3, 4, (b"b", 1))],
    "of two that set the same version one wins": [
        MADE,
        write(2, 4, b"l", Answer("mismatch"), 0),
        write(2, 4, b"r", 1, 0),
        get(5, 6, (b"r", 1)),
    ],
    "a write without an answer took effect late": [
        MADE,
        write(2, math.inf, b"b", UNKNOWN),
        get(3, 4, (b"a", 0)),
        get(5, 6, (b"b", 1)),
    ],
    "a write without an answer never took effect": [
        MADE,
        write(2, math.inf, b"b", UNKNOWN),
        write(3, 4, b"c", 1),
        get(5, 6, (b"c", 1)),
    ],
    "gone and made again": [
        MADE,
        Call("delete", 2, 3, DONE),
        get(4, 5, None),
        write(4, 5, b"x", Answer("missing")),
        create(6, 7, b"c"),
        create(8, 9, b"d", Answer("exists")),
    ],
}
BAD = {
    "a lost write": [MADE, write(2, 3, b"b", 1), get(4, 5, (b"a", 0))],
    "a value from nowhere": [MADE, get(2, 3, (b"b", 0))],
    "time runs backwards for a second reader": [
        MADE,
        write(2, 9, b"b", 1),
        get(3, 4, (b"b", 1)),
        get(5, 6, (b"a", 0)),
    ],
    "both set the same version": [MADE, write(2, 4, b"l", 1, 0), write(2, 4, b"r", 1, 0)],
    "a version is skipped": [MADE, write(2, 3, b"b", 2)],
    "refused though nobody else wrote": [MADE, write(2, 3, b"b", Answer("mismatch"), 0)],
    "made twice": [MADE, create(2, 3, b"b")],
    "a write without an answer took effect before it began": [
        MADE,
        get(2, 3, (b"b", 1)),
        write(4, math.inf, b"b", UNKNOWN),
    ],
    "a write without an answer took effect and went away again": [
        MADE,
        write(2, math.inf, b"b", UNKNOWN),
        get(3, 4, (b"b", 1)),
        get(5, 6, (b"a", 0)),
    ],
}


@pytest.mark.parametrize("name", GOOD)
def test_a_history_that_can_have_happened_is_accepted(name: str) -> None:
    assert is_linearizable(GOOD[name])
    assert is_linearizable(GOOD[name][::-1])


@pytest.mark.parametrize("name", BAD)
def test_a_history_that_cannot_have_happened_is_refused(name: str) -> None:
    assert not is_linearizable(BAD[name])
    assert not is_linearizable(BAD[name][::-1])


def some_order_fits(history: Sequence[Call]) -> bool:
    """By trying all of them."""
    for order in itertools.permutations(history):
        later = [order[number + 1 :] for number in range(len(order))]
        if any(other.end < call.begin for call, others in zip(order, later, strict=True) for other in others):
            continue
        state: State = None
        for call in order:
            fits, state = step(state, call)
            if not fits:
                break
        else:
            return True
    return False


states = st.one_of(st.none(), st.tuples(st.sampled_from([b"a", b"b"]), st.integers(0, 2)))
answers = st.one_of(
    st.sampled_from([Answer(kind) for kind in ("done", "exists", "mismatch", "missing", "unknown")]),
    st.builds(Answer, st.just("done"), states, st.integers(1, 3)),
)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    kind = draw(st.sampled_from(["get", "create", "create", "write", "write", "delete"]))
    answer = draw(answers)
    if kind == "get":
        answer = Answer("done", draw(states))
    begin = draw(st.integers(0, 12))
    end = math.inf if answer.kind == "unknown" else begin + draw(st.integers(1, 8)) + 0.5
    expected = draw(st.one_of(st.none(), st.integers(0, 2))) if kind in ("write", "delete") else None
    return Call(kind, begin, end, answer, draw(st.sampled_from([b"a", b"b"])), expected)


@settings(max_examples=400, derandomize=True, deadline=None)
@given(st.lists(calls(), max_size=6))
def test_the_search_agrees_with_trying_every_order(history: list[Call]) -> None:
    assert is_linearizable(history) == some_order_fits(history)


def test_a_long_history_of_many_writers_is_decided_quickly_enough_to_be_used() -> None:
    overlapping = [write(number * 2, number * 2 + 3, str(number).encode(), number) for number in range(1, 500)]
    history = [MADE, *overlapping]
    assert is_linearizable(history)
    assert not is_linearizable([*history, get(2000, 2001, (b"498", 498))])
