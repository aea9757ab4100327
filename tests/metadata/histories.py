"""Whether what clients saw of one entry can have happened one at a time, each call between its begin and its end.

The search is that of Wing and Gong (1993) with the memory of Lowe (2017), as in Porcupine: calls are taken in turn,
those that fit are put next, and a set of calls that has led to the same state before is not tried again. A call without
an answer (``UNKNOWN``) may take effect at any time after its begin, or never.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

State = tuple[bytes, int] | None
"""An entry's value and version, or nothing."""


class Answer(NamedTuple):
    """``kind``: "done", "exists", "mismatch", "missing", "unknown"; ``state``: what a get found, ``version``: what a
    write returned."""

    kind: str
    state: State = None
    version: int = 0


UNKNOWN = Answer("unknown")


class Call(NamedTuple):
    """``kind``: "get", "create", "write", "delete". Times are of one clock; ``end`` is infinite for UNKNOWN."""

    kind: str
    begin: float
    end: float
    answer: Answer
    value: bytes = b""
    expected: int | None = None


def step(state: State, call: Call) -> tuple[bool, State]:
    """Whether the call can have had its answer in that state, and the next state."""
    outcome, after = _effect(state, call)
    answer = call.answer
    if answer.kind == "unknown":
        return True, after
    if outcome != answer.kind:
        return False, state
    if call.kind == "get":
        return answer.state == state, state
    if call.kind == "write" and outcome == "done" and after is not None:
        return after[1] == answer.version, after
    return True, after


def _effect(state: State, call: Call) -> tuple[str, State]:
    if call.kind == "get":
        return "done", state
    if call.kind == "create":
        return ("done", (call.value, 0)) if state is None else ("exists", state)
    if state is None:
        return "missing", None
    if call.expected is not None and call.expected != state[1]:
        return "mismatch", state
    return "done", (call.value, state[1] + 1) if call.kind == "write" else None


class _Event:
    """A call's begin or end in the list of what is not put in order yet."""

    def __init__(self, number: int, call: Call, end: _Event | None) -> None:
        self.number = number
        self.call = call
        self.end = end  # None: this is the end
        self.previous: _Event | None = None
        self.next: _Event | None = None


def is_linearizable(history: Sequence[Call], initial: State = None) -> bool:
    head = _listed(history)
    state, taken = initial, 0
    order: list[tuple[_Event, State]] = []
    seen: set[tuple[int, State]] = set()
    event = head.next
    while head.next is not None:
        if event is None:
            raise ValueError("a call's end is missing from the list")
        if event.end is None:  # a call that should have come before this is not in the order: take the last one back
            if not order:
                return False
            event, state = order.pop()
            taken &= ~(1 << event.number)
            _put_back(event)
            event = event.next
            continue
        fits, after = step(state, event.call)
        now = (taken | 1 << event.number, after)
        if fits and now not in seen:
            seen.add(now)
            order.append((event, state))
            taken, state = now
            _take_out(event)
            event = head.next
        else:
            event = event.next
    return True


def _listed(history: Sequence[Call]) -> _Event:
    events: list[tuple[float, int, _Event]] = []
    for number, call in enumerate(history):
        end = _Event(number, call, None)
        # Where one ends when another begins they count as concurrent, which accepts more and never less.
        events.append((call.begin, 0, _Event(number, call, end)))
        events.append((math.inf if call.answer.kind == "unknown" else call.end, 1, end))
    head = _Event(-1, Call("", 0, 0, UNKNOWN), None)
    last = head
    for _, _, event in sorted(events, key=lambda found: found[:2]):
        last.next, event.previous = event, last
        last = event
    return head


def _take_out(event: _Event) -> None:
    for one in (event, event.end):
        if one is not None and one.previous is not None:
            one.previous.next = one.next
            if one.next is not None:
                one.next.previous = one.previous


def _put_back(event: _Event) -> None:
    for one in (event.end, event):
        if one is not None and one.previous is not None:
            one.previous.next = one
            if one.next is not None:
                one.next.previous = one
