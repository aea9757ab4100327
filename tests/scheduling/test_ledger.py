"""The ledger: every ticket ends once, and everything adds up."""

from __future__ import annotations

import msgspec
import pytest

from actors.env.messages import Ticket
from coordinator.scheduling.ledger import Balance, Ledger, LedgerError
from tests.scheduling.support import stored


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
    ledger.train(["a"])
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


def test_what_was_live_and_is_not_buffered_any_more_was_lost_by_the_interruption() -> None:
    before = Balance(admitted=10, trained=3, lost={"x": 1}, evicted={"stale": 1}, in_flight=2, buffered=2, taken=1)
    ledger = Ledger()
    ledger.restore(before, [ticket("t1"), ticket("t2")])
    after = ledger.balance()
    assert after.lost == {"x": 1, "interrupted": 3}
    assert (after.buffered, after.in_flight, after.taken) == (2, 0, 0)
    assert after.holds
