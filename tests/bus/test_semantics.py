"""What the model makes of histories written by hand."""

from __future__ import annotations

from typing import Any

from tests.bus.history import AnyEvent, Down, Ended, Handled, History, Life, Lost, Sent, Staffed, Told, Up, Watched
from tests.bus.semantics import violations

A, B, B2 = Life("a", 1), Life("b", 1), Life("b", 2)
BORN: list[AnyEvent] = [event(at=0.0, life=life) for life in (A, B) for event in (Up, Staffed)]
RESTARTED: list[AnyEvent] = [Down(at=2.0, life=B, killed=True), Up(at=3.0, life=B2), Staffed(at=3.0, life=B2)]
HERE = Watched(at=1.0, life=A, watch=1, to="b", epoch=1)


def ask(**facts: Any) -> Sent:
    return Sent(at=1.0, life=A, op=7, kind="ask", to="b", epoch=0, timeout_s=60.0, **facts)


def handled(by: Life, at: float) -> Handled:
    return Handled(at=at, life=by, op=7, by=A)


def ended(how: str, at: float, **facts: Any) -> Ended:
    return Ended(at=at, life=A, op=7, how=how, **facts)


def guarantees(*events: AnyEvent) -> set[str]:
    """Those that the history contradicts."""
    history = History([*BORN, *sorted(events, key=lambda event: event.at)], over_at=100.0)
    return {text.partition(":")[0] for text in violations(history)}


def test_an_ask_to_whichever_answers_may_take_effect_on_two_incarnations() -> None:
    reply = ended("reply", 5.0, answered=B2, about=7)
    assert guarantees(ask(retries=1), handled(B, 1.5), *RESTARTED, handled(B2, 4.0), reply) == set()


def test_an_ask_to_a_name_may_not() -> None:
    reply = ended("reply", 5.0, answered=B2, about=7)
    sent = ask(retries=1, named=True, in_turn=False)
    assert guarantees(sent, handled(B, 1.5), *RESTARTED, handled(B2, 4.0), reply) == {"at most once"}
    assert guarantees(sent, *RESTARTED, handled(B2, 4.0), reply) == set()


def test_who_asks_by_name_hears_of_a_restart_where_there_was_one() -> None:
    assert guarantees(ask(named=True), ended("PeerRestarted", 5.0)) == {"true losses"}
    assert guarantees(ask(named=True), *RESTARTED, ended("PeerRestarted", 5.0)) == set()
    assert guarantees(ask(), *RESTARTED, ended("PeerRestarted", 5.0)) == {"true losses"}


def test_a_linked_actor_ends_where_the_other_one_did() -> None:
    told = Told(at=5.0, life=A, watch=1, kind="linked")
    assert guarantees(HERE, *RESTARTED, told) == set()
    assert guarantees(HERE, *RESTARTED) == {"every Down"}


def test_and_not_without_a_reason() -> None:
    told = Told(at=5.0, life=A, watch=1, kind="linked")
    assert guarantees(HERE, told) == {"true losses"}
    assert guarantees(HERE, Lost(at=2.0, life=B, other=A), told) == set()
