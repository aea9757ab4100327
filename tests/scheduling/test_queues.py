"""What waits to be started: who is next, who has waited too long, and who is too much."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core import Ref
from bus.message import NodeAddress
from coordinator.scheduling.envhosts import EnvHosts
from coordinator.scheduling.fairness import FairQueue, Item
from coordinator.scheduling.queues import BURST, ElasticCapacity, LevelQueues


def item(id_: str, *, flow: str = "", group: int = 0, number: int = 0) -> Item:
    return Item(id_, flow, group, number)


def queue_of(*items: Item, weights: dict[str, float] | None = None) -> FairQueue:
    queue = FairQueue()
    queue.set_weights(weights or {})
    for each in items:
        queue.add(each)
    return queue


def all_of(queue: FairQueue) -> list[str]:
    order = []
    while (taken := queue.take()) is not None:
        order.append(taken.id)
    return order


# ---- fairness ------------------------------------------------------------------------------------------------------


def test_older_groups_go_first_whenever_they_come() -> None:
    queue = queue_of(item("new", group=5, number=1), item("again", group=2, number=2), item("newer", group=6, number=3))
    assert all_of(queue) == ["again", "new", "newer"]


def test_flows_alternate_by_their_weights_as_by_hand() -> None:
    """Quanta 2 and 1: two of a, one of b, in turn, until a has none left."""
    items = [item(f"{flow}{number}", flow=flow, number=number) for flow in "ab" for number in range(4)]
    queue = queue_of(*items, weights={"a": 1.0, "b": 0.5})
    assert all_of(queue) == ["a0", "a1", "b0", "a2", "a3", "b1", "b2", "b3"]


def test_what_is_removed_is_not_taken_and_may_come_again() -> None:
    queue = queue_of(item("x", number=0), item("y", number=1))
    assert queue.remove("x") is not None
    assert queue.remove("x") is None
    queue.add(item("x", number=2))
    queue.add(item("x", number=3))  # it waits already
    assert all_of(queue) == ["y", "x"]
    assert len(queue) == 0
    assert queue.waiting == {}


def test_a_flow_without_weight_still_ends() -> None:
    queue = queue_of(item("a", flow="a"), item("b", flow="b"), weights={"a": 1.0, "b": 0.0})
    assert sorted(all_of(queue)) == ["a", "b"]


@given(
    weights=st.dictionaries(st.sampled_from("abcde"), st.floats(0.1, 10.0), min_size=2),
    steps=st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 3)), max_size=120),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_while_flows_have_something_waiting_their_takes_are_as_their_quanta(
    weights: dict[str, float], steps: list[tuple[str, int]]
) -> None:
    """From the moment on at which the second of the two began to wait, as long as both do."""
    queue = queue_of(weights=weights)
    smallest = min(weights.values())
    since: dict[tuple[str, str], Counter[str]] = {}
    number = 0
    for flow, takes in steps:
        if flow in weights:
            number += 1
            queue.add(item(f"{flow}{number}", flow=flow, number=number))
        for _ in range(takes):
            busy = sorted(queue.waiting)
            pairs = [(one, other) for one in busy for other in busy if one < other]
            since = {pair: since.get(pair, Counter()) for pair in pairs}
            taken = queue.take()
            if taken is None:
                break
            for pair, counts in since.items():
                counts[taken.flow] += 1
                one, other = (counts[name] * smallest / weights[name] for name in pair)
                assert abs(one - other) < 3


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=200))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_every_ticket_that_waits_is_taken_in_the_end(steps: list[tuple[int, bool]]) -> None:
    queue, waiting = queue_of(), set[str]()
    for number, (flow, take) in enumerate(steps):
        queue.add(item(f"t{number}", flow=f"f{flow}", group=number // 3, number=number))
        waiting.add(f"t{number}")
        if take and (taken := queue.take()) is not None:
            waiting.remove(taken.id)
    assert sorted(all_of(queue)) == sorted(waiting)


# ---- levels --------------------------------------------------------------------------------------------------------


def levels(*, time_to_live_s: float = 100.0) -> LevelQueues:
    return LevelQueues(time_to_live_s=time_to_live_s)


def test_evaluation_goes_before_short_ones_and_those_before_the_rest() -> None:
    queues = levels()
    queues.add(item("long"), "elastic", 0.0)
    queues.add(item("short"), "short", 1.0)
    queues.add(item("held-out"), "evaluation", 2.0)
    assert [queues.take(), queues.take(), queues.take(), queues.take()] == ["held-out", "short", "long", None]


def test_after_a_burst_of_short_ones_an_elastic_one_is_due() -> None:
    queues = levels()
    for number in range(3 * BURST):
        queues.add(item(f"s{number:02}", number=number), "short", 0.0)
    for number in range(2):
        queues.add(item(f"e{number}", number=number), "elastic", 0.0)
    order = [queues.take() or "" for _ in range(3 * BURST + 2)]
    assert [index for index, id_ in enumerate(order) if id_.startswith("e")] == [BURST, 2 * BURST + 1]


def test_what_waits_longer_than_the_time_to_live_is_named_but_for_evaluations() -> None:
    queues = levels(time_to_live_s=10.0)
    queues.add(item("held-out"), "evaluation", 0.0)
    queues.add(item("first"), "elastic", 0.0)
    queues.add(item("second"), "short", 5.0)
    assert queues.expired(10.0) is None
    assert queues.expired(11.0) == "first"
    queues.remove("first")
    assert queues.expired(15.0) is None
    assert queues.expired(16.0) == "second"


def test_the_least_recently_used_group_is_too_much_first_and_one_that_has_begun_last() -> None:
    queues = levels()
    for group in range(3):
        for member in range(2):
            queues.add(item(f"g{group}m{member}", group=group, number=2 * group + member), "elastic", float(group))
    assert queues.overfull() is None  # it is not known yet how many places there are
    queues.elastic.measure(1, 0.0)  # two may wait, and four may be kept
    queues.used(0)
    assert queues.overfull() == "g1m0"
    assert queues.take() == "g0m0"  # group 0 has begun: something would be lost with it
    assert queues.overfull() == "g1m0"
    queues.remove("g1m0")
    assert queues.overfull() is None
    for member in range(2):
        queues.add(item(f"g3m{member}", group=3, number=6 + member), "elastic", 3.0)
    order = []
    while (surplus := queues.overfull()) is not None:
        order.append(surplus)
        queues.remove(surplus)
    assert order == ["g1m1", "g2m0"]


def test_as_many_may_wait_as_are_started_in_a_minute_but_at_least_two_rounds_of_places() -> None:
    capacity = ElasticCapacity()
    assert capacity.capacity == math.inf
    capacity.measure(10, 0.0)
    assert capacity.capacity == 20
    for second in range(1, 1000):
        capacity.started(4)
        capacity.measure(10, float(second))
    assert capacity.rate == pytest.approx(4.0)
    assert capacity.capacity == 240
    for second in range(1000, 2000):
        capacity.measure(10, float(second))
    assert capacity.capacity == 20
    capacity.measure(0, 2001.0)  # nothing is started anywhere: for now
    assert capacity.capacity == 20


def test_a_group_may_always_wait_where_nothing_does() -> None:
    queues = levels()
    queues.elastic.measure(1, 0.0)
    assert queues.room(8)
    assert not queues.room(8, coming=1)
    assert queues.room(1, coming=1)
    queues.add(item("x"), "elastic", 0.0)
    assert not queues.room(2)


# ---- hosts ---------------------------------------------------------------------------------------------------------


def host(name: str) -> Ref:
    return Ref(NodeAddress(name, f"tcp://{name}:1", "", 1), "env")


def given_to(hosts: EnvHosts, ticket: str) -> str | None:
    chosen = hosts.choose()
    if chosen is None:
        return None
    hosts.give(ticket, chosen)
    return chosen.name


def test_the_least_used_host_is_next_and_none_beyond_its_places_and_a_few() -> None:
    hosts = EnvHosts()
    hosts.join(host("a"), 4)
    hosts.join(host("b"), 8)
    order = [given_to(hosts, f"t{number}") for number in range(17)]
    assert "".join(name or "-" for name in order) == "abb" * 5 + "a" + "-"


def test_a_place_is_free_again_once_its_trajectory_is_only_scored() -> None:
    hosts = EnvHosts()
    hosts.join(host("a"), 2)
    for number in range(4):
        assert given_to(hosts, f"t{number}") == "a"
    assert given_to(hosts, "t4") is None
    hosts.left_place("t0")
    assert given_to(hosts, "t4") == "a"
    hosts.ended("t0")
    assert given_to(hosts, "t5") is None
    hosts.ended("t1")
    assert given_to(hosts, "t5") == "a"


def test_a_drained_host_gets_nothing_and_counts_for_no_places() -> None:
    hosts = EnvHosts()
    hosts.join(host("a"), 2)
    hosts.join(host("b"), 3)
    assert hosts.places == 5
    assert hosts.drain("a", draining=True) == 0
    assert hosts.places == 3
    assert {given_to(hosts, f"t{number}") for number in range(5)} == {"b"}
    assert given_to(hosts, "t9") is None
    hosts.drain("a", draining=False)
    assert given_to(hosts, "t9") == "a"


def test_a_host_that_is_gone_leaves_its_tickets_behind() -> None:
    hosts = EnvHosts()
    hosts.join(host("a"), 0)
    hosts.join(host("b"), 0)
    for number in range(3):
        given_to(hosts, f"t{number}")
    assert hosts.leave("a") == ["t0", "t2"]
    hosts.ended("t0")
    assert given_to(hosts, "t3") == "b"
    assert hosts.places is None  # b never said


@given(
    st.lists(st.tuples(st.sampled_from(["give", "end", "settle", "drain", "fill"]), st.integers(0, 9)), max_size=150)
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_the_chosen_host_is_the_least_used_of_those_with_room(steps: list[tuple[str, int]]) -> None:
    """Against looking at all of them."""
    hosts = EnvHosts()
    for number, places in enumerate((1, 2, 4)):
        hosts.join(host(f"h{number}"), places)
    for serial, (what, which) in enumerate(steps):
        name = f"h{which % 3}"
        on = [ticket for each in hosts.all() for ticket in each.tickets]
        if what == "give":
            chosen = hosts.choose()
            room = [each for each in hosts.all() if not each.draining and each.used < each.limit]
            assert chosen is min(room, key=lambda each: (each.used / each.places, each.number), default=None)
            if chosen is not None:
                hosts.give(f"t{serial}", chosen)
        elif what == "end" and on:
            hosts.ended(on[which % len(on)])
        elif what == "settle" and on:
            hosts.left_place(on[which % len(on)])
        elif what in ("drain", "fill"):
            hosts.drain(name, draining=what == "drain")
