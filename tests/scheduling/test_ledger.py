"""The ledger: every ticket ends once, and everything adds up."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from actors.env.messages import Ticket
from coordinator.scheduling.journal import Event
from coordinator.scheduling.ledger import Balance, Ledger, LedgerError
from tests.scheduling.support import Written, stored


def ticket(id_: str) -> Ticket:
    return Ticket(id_, group=0, task=0, purpose="train", temperature=1.0, seed=0)


def ledger_with(*ids: str) -> Ledger:
    ledger = Ledger()
    for id_ in ids:
        ledger.admit(ticket(id_))
    return ledger


def test_every_way_to_end_is_counted_under_its_name() -> None:
    ledger = ledger_with("a", "b", "c", "d", "e", "f")
    for id_ in "abd":
        ledger.buffer(stored(id_))
    ledger.take(["a", "b"])
    ledger.train(["a"], 1)
    ledger.lose("c", "env_failed")
    ledger.evict("d", "stale")
    ledger.evict("e", "straggler")
    balance = ledger.balance()
    assert balance == Balance(
        admitted=6,
        trained=1,
        lost={"env_failed": 1},
        evicted={"stale": 1, "straggler": 1},
        in_flight=1,
        buffered=0,
        taken=1,
    )
    assert balance.holds
    assert ledger.ended() == {"env_failed": 1, "stale": 1, "straggler": 1}
    assert str(balance) == (
        "admitted 6 = trained 1 + lost (env_failed 1) + evicted (stale 1, straggler 1) + in flight 1 + buffered 0 + "
        "taken 1"
    )


def test_a_balance_with_one_ticket_too_few_does_not_hold() -> None:
    balance = ledger_with("a", "b").balance()
    assert not msgspec.structs.replace(balance, in_flight=1).holds


def test_a_ticket_is_admitted_once() -> None:
    with pytest.raises(LedgerError, match="ticket a was admitted already"):
        ledger_with("a").admit(ticket("a"))


def test_what_has_ended_cannot_end_again() -> None:
    ledger = ledger_with("a")
    ledger.lose("a", "env_failed")
    with pytest.raises(LedgerError, match="ticket a is not live"):
        ledger.lose("a", "env_failed")
    with pytest.raises(LedgerError, match="ticket a is not live"):
        ledger.buffer(stored("a"))
    assert ledger.balance().holds


def test_a_ticket_that_runs_cannot_be_taken_nor_one_that_is_buffered_be_lost() -> None:
    ledger = ledger_with("a", "b")
    ledger.buffer(stored("b"))
    with pytest.raises(LedgerError, match="ticket a is admitted, expected buffered"):
        ledger.take(["b", "a"])
    with pytest.raises(LedgerError, match="ticket b is buffered, expected admitted"):
        ledger.lose("b", "env_failed")
    assert (ledger.balance().buffered, ledger.balance().taken) == (1, 0)  # a refused batch takes nothing


def test_a_taken_ticket_is_not_evicted_under_the_step_that_trains_on_it() -> None:
    ledger = ledger_with("a")
    ledger.buffer(stored("a"))
    ledger.take(["a"])
    with pytest.raises(LedgerError, match="ticket a is taken"):
        ledger.evict("a", "stale")
    ledger.put_back(["a"])
    ledger.evict("a", "stale")
    assert ledger.balance().holds


def test_the_journal_has_every_transition() -> None:
    journal = Written()
    ledger = Ledger(journal)
    for id_ in "abcd":
        ledger.admit(ticket(id_))
    ledger.buffer(stored("a", version=3))
    ledger.take(["a"])
    ledger.train(["a"], 4)
    ledger.lose("b", "env_failed", "the wheel came off")
    ledger.evict("c", "stale")
    assert journal.events == [
        *(Event("admitted", [id_], group=0, task=0) for id_ in "abcd"),
        Event("stored", ["a"], 3),
        Event("trained", ["a"], 4),
        Event("lost", ["b"], reason="env_failed", detail="the wheel came off"),
        Event("evicted", ["c"], reason="stale"),
    ]
    assert ledger.live() == ["d"]


def test_a_transition_that_the_journal_cannot_take_does_not_happen() -> None:
    class Full(Written):
        def write(self, events: Sequence[Event]) -> None:
            raise OSError("no space left on device")

    ledger = Ledger(Full())
    with pytest.raises(OSError, match="no space left"):
        ledger.admit(ticket("a"))
    assert (ledger.admitted, ledger.live()) == (0, [])


def test_going_back_to_a_checkpoint_counts_everything_since_under_a_reason() -> None:
    """At the checkpoint a and b are buffered, c runs and 4 have ended. Since then a was trained on, b evicted, c and d
    stored, e trained on, f lost, g and h run; of h the store has heard. The checkpoint's buffer is a alone: the bytes
    of b are gone."""
    before = Balance(admitted=7, trained=3, lost={"x": 1}, evicted={}, in_flight=1, buffered=2, taken=0)
    since = [
        *(Event("admitted", [id_]) for id_ in "defgh"),
        *(Event("stored", [id_], 1) for id_ in "cde"),
        Event("evicted", ["b"], reason="stale"),
        Event("trained", ["a", "e"], 2),
        Event("lost", ["f"], reason="x"),
    ]
    journal = Written()
    ledger = Ledger(journal)
    ledger.restore(before, ["a", "b", "c"], [ticket("a")], version=1, since=since, acknowledged=["a", "h", "stranger"])
    after = ledger.balance()
    assert after == Balance(
        admitted=12,
        trained=3,
        lost={"x": 2, "unsaved": 3, "rolled_back": 1, "interrupted": 1},
        evicted={"stale": 1},
        in_flight=0,
        buffered=1,
        taken=0,
    )
    assert after.holds
    assert journal.events == [
        Event("resumed", ["a"], 1),
        Event("lost", ["c", "d", "h"], reason="unsaved"),
        Event("lost", ["e"], reason="rolled_back"),
        Event("lost", ["g"], reason="interrupted"),
    ]


def test_going_back_twice_to_one_checkpoint_counts_the_same_once() -> None:
    before = Balance(admitted=2, trained=0, lost={}, evicted={}, in_flight=1, buffered=1, taken=0)
    since = [Event("trained", ["a"], 1), Event("admitted", ["c"])]
    journal = Written()
    Ledger(journal).restore(before, ["a", "b"], [ticket("a")], version=0, since=since)
    again = Ledger()
    again.restore(before, ["a", "b"], [ticket("a")], version=0, since=[*since, *journal.events])
    assert again.balance() == Balance(3, 0, {"interrupted": 2}, {}, 0, 1, 0)
    assert again.balance().holds
