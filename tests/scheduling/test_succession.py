"""What a new leader makes of the journal of the one before, wherever in it that one died."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from actors.env.messages import Outcome, Ticket
from coordinator.scheduling.journal import Event
from coordinator.scheduling.ledger import Ledger
from coordinator.scheduling.mix import Mix, TaskStream
from coordinator.scheduling.rolling import RollingScheduler
from coordinator.scheduling.succession import JournalReader, found_in
from tests.scheduling.support import Written, lost, rules, started, stored


class Life:
    """A scheduler under random events, of which every outcome and its place in the journal is remembered."""

    def __init__(self, seed: int, events: int) -> None:
        self.chance = random.Random(seed)
        self.journal = Written()
        self.outcomes: dict[str, Outcome] = {}
        self.made = RollingScheduler(rules(alpha=1, groups=2, size=3, redundant=1), Ledger(self.journal))
        self.made.open()
        self.running: list[Ticket] = []
        for _ in range(events):
            self.running += started(self.made)
            self._something()

    def _something(self) -> None:
        if self.made.ready():
            self.made.take()
            if self.chance.random() < 0.2:
                self.made.put_back()
            else:
                self.made.trained(self.made.version + 1)
            return
        ticket = self.running.pop(self.chance.randrange(len(self.running)))
        if self.chance.random() < 0.15:
            self.made.lost(lost(ticket.id, self.chance.choice(["env_failed", "stale"])))
        else:
            self.outcomes[ticket.id] = stored(ticket.id, max(0, self.made.version - self.chance.randrange(2)))
            self.made.stored(self.outcomes[ticket.id])


@pytest.mark.parametrize("seed", range(4))
def test_from_any_line_on_nothing_is_lost_and_groups_are_whole_again(seed: int) -> None:
    life = Life(seed, events=60)
    events = life.journal.events
    for length in range(len(events) + 1):
        journal = Written()
        journal.write(events[:length])
        admitted = Counter(ticket for event in events[:length] if event.event == "admitted" for ticket in event.tickets)
        assert set(admitted.values()) <= {1}
        found = found_in(journal.events)
        assert found.balance.holds
        assert found.balance.admitted == len(admitted)
        made = RollingScheduler(life.made.rules, Ledger(journal))
        made.inherit(found, life.outcomes, running=(), epoch=2)
        assert made.ledger.balance().holds
        assert {event.event for event in journal.events[length:]} <= {"admitted", "evicted"}
        for group in found.groups.values():
            members = [id_ for id_ in made.ledger.live() if made.ledger.entry(id_).ticket.group == group.index]
            assert len(members) in (0, 3)
        again = started(made)
        waiting = {id_ for id_ in made.ledger.live() if made.ledger.entry(id_).state == "admitted"}
        assert {ticket.id for ticket in again} == waiting
        made.open()
        assert len({made.ledger.entry(id_).ticket.group for id_ in made.ledger.live()}) <= made.rules.capacity


def test_a_ticket_that_is_started_again_is_the_one_that_was_admitted_and_asks_engines_anew() -> None:
    """Those have answered some of its requests, perhaps, on a host that went with the leader."""
    journal = Written()
    first = RollingScheduler(rules(), Ledger(journal))
    first.open()
    admitted = started(first)
    second = RollingScheduler(rules(), Ledger(journal))
    second.inherit(found_in(journal.events), {}, running={admitted[0].id}, epoch=2)
    again = started(second)
    assert [msgspec.structs.replace(ticket, again=0) for ticket in again] == admitted[1:]
    assert admitted[1].request(0) == "t1/0"
    assert [ticket.request(0) for ticket in again][:2] == ["t1.2/0", "t2.2/0"]


def test_what_the_store_has_lost_is_evicted_by_name() -> None:
    events = [
        Event("admitted", ["t0"], group=0, task=5),
        Event("admitted", ["t1"], group=0, task=5),
        Event("stored", ["t0"], 0),
    ]
    journal = Written()
    journal.write(events)
    made = RollingScheduler(rules(), Ledger(journal))
    made.inherit(found_in(events), {}, running={"t1"}, epoch=2)
    assert made.ledger.balance().evicted == {"store_lost": 2}
    assert made.to_stop == [("t1", "store_lost")]


def test_what_a_person_has_ordered_is_still_in_force() -> None:
    journal = Written()
    streams = {"easy": TaskStream(weight=3.0), "hard": TaskStream(weight=1.0, first=100)}
    first = RollingScheduler(rules(alpha=1), Ledger(journal), Mix(streams))
    first.open()
    first.set_rules(rules(alpha=3, redundant=2))
    first.set_weights({"hard": 9.0})
    first.set_paused(True)
    first.ledger.ruled(Event("ruled", [], places=6))
    found = found_in(journal.events)
    assert found.paused
    assert found.places == 6
    second = RollingScheduler(rules(alpha=1), Ledger(journal), Mix(streams))
    running = set(first.ledger.live())
    second.inherit(found, {}, running=running, epoch=2)
    assert second.rules == rules(alpha=3, redundant=2)
    assert second.mix.shares == {"easy": 0.25, "hard": 0.75}
    assert second.mix.admitted == first.mix.admitted
    first.set_paused(False)
    assert not found_in(journal.events).paused


def test_a_journal_that_is_read_as_it_grows_says_the_same(tmp_path: Path) -> None:
    events = Life(5, events=60).journal.events
    path = tmp_path / "ledger.jsonl"
    reader = JournalReader(path)
    reader.catch_up()  # before there is one
    with path.open("wb", buffering=0) as file:
        for number, event in enumerate(events):
            line = msgspec.json.encode(event)
            file.write(line[: len(line) // 2])
            if number % 3 == 0:
                reader.catch_up()
            file.write(line[len(line) // 2 :] + b"\n")
        file.write(b'{"event":"admi')  # torn
    assert reader.found() == found_in(events)


def test_going_back_to_a_checkpoint_is_read_as_that() -> None:
    events = [
        Event("admitted", ["t0"], group=0, task=5),
        Event("admitted", ["t1"], group=0, task=5),
        Event("stored", ["t0"], 0),
        Event("stored", ["t1"], 0),
        Event("admitted", ["t2"], group=1, task=6),
        Event("trained", ["t0", "t1"], 1),
        Event("resumed", ["t0"], 0, group=1),  # the checkpoint was taken when t0 was stored, and group 0 alone begun
        Event("lost", ["t1"], reason="rolled_back"),
        Event("lost", ["t2"], reason="interrupted"),
        Event("admitted", ["t3"], group=0, task=5),
    ]
    found = found_in(events)
    assert found.version == 0
    assert found.next_group == 1
    assert found.next_ticket == 4
    assert found.trained == 0
    assert found.lost == {"rolled_back": 1, "interrupted": 1}
    (group,) = found.groups.values()
    assert (group.index, group.task, group.stored, group.missing, group.retries) == (0, 5, {"t0": 0}, ["t3"], 0)
