"""Streams of tasks: which one the next group is of, and which task."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.job import JobError, convert, declared_classes
from coordinator.scheduling.ledger import Ledger
from coordinator.scheduling.mix import Mix, TaskStream
from coordinator.scheduling.rolling import RollingScheduler, SchedulerState
from tests.scheduling.support import rules, started


def drawn(mix: Mix, groups: int) -> list[tuple[str, int]]:
    return [mix.next() for _ in range(groups)]


def test_without_streams_every_task_comes_once_in_order() -> None:
    assert [task for _, task in drawn(Mix({}), 5)] == [0, 1, 2, 3, 4]


def test_a_stream_goes_through_its_tasks_and_begins_again() -> None:
    mix = Mix({"few": TaskStream(first=100, count=3)})
    assert [task for _, task in drawn(mix, 7)] == [100, 101, 102, 100, 101, 102, 100]


def test_three_to_one_by_hand() -> None:
    """Credits of (a, b) before each choice: (.75, .25), (.5, .5) where the first one named wins, (.25, .75), (1, 0)."""
    mix = Mix({"a": TaskStream(weight=3.0), "b": TaskStream(weight=1.0)})
    assert "".join(name for name, _ in drawn(mix, 8)) == "aabaaaba"


@given(weights=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6), groups=st.integers(1, 300))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_stream_is_a_whole_group_ahead_of_its_share_nor_further_behind_than_others_there_are(
    weights: list[float], groups: int
) -> None:
    mix = Mix({f"s{index}": TaskStream(weight=weight) for index, weight in enumerate(weights)})
    counts: Counter[str] = Counter()
    for number, (name, _) in enumerate(drawn(mix, groups), start=1):
        counts[name] += 1
        for index, weight in enumerate(weights):
            fair = number * weight / sum(weights)
            assert fair - (len(weights) - 1) - 1e-6 < counts[f"s{index}"] < fair + 1 + 1e-6


def test_changed_weights_hold_from_then_on_and_do_not_make_up_for_what_was() -> None:
    mix = Mix({"a": TaskStream(), "b": TaskStream()})
    drawn(mix, 100)
    assert mix.set_weights({"b": 3.0}) == {"a": 0.25, "b": 0.75}
    assert Counter(name for name, _ in drawn(mix, 100)) == {"a": 25, "b": 75}
    mix.set_weights({"a": 0.0})
    assert Counter(name for name, _ in drawn(mix, 10)) == {"b": 10}


@pytest.mark.parametrize("weights", [{"a": -1.0}, {"a": 0.0, "b": 0.0}, {"c": 1.0}, {"a": float("nan")}])
def test_impossible_weights_change_nothing(weights: dict[str, float]) -> None:
    mix = Mix({"a": TaskStream(), "b": TaskStream()})
    with pytest.raises(ValueError, match=r"weight|no stream of tasks c; there are a, b"):
        mix.set_weights(weights)
    assert mix.shares == {"a": 0.5, "b": 0.5}


def test_a_resumed_run_goes_on_with_the_order_of_its_streams() -> None:
    def fresh() -> RollingScheduler:
        streams = {"a": TaskStream(weight=2.0), "b": TaskStream(first=1000)}
        return RollingScheduler(rules(alpha=1), Ledger(), Mix(streams))

    made = fresh()
    made.open()
    tickets = started(made)
    assert sorted({(ticket.group, ticket.task) for ticket in tickets}) == [(0, 0), (1, 1000), (2, 1), (3, 2)]
    state = msgspec.json.decode(msgspec.json.encode(made.state()), type=SchedulerState)
    resumed = fresh()
    resumed.restore(state, 0, [])
    made.set_rules(rules(alpha=3))
    resumed.open()
    started(resumed)
    resumed.set_rules(rules(alpha=3))
    following = [(ticket.group, ticket.task) for ticket in started(made)]
    assert [(ticket.group, ticket.task) for ticket in started(resumed)] == following


def test_a_checkpoint_that_knows_no_streams_goes_on_with_all_tasks() -> None:
    made = RollingScheduler(rules(alpha=1), Ledger())
    made.open()
    state = msgspec.structs.replace(made.state(), mix={})
    resumed = RollingScheduler(rules(alpha=2), Ledger())
    resumed.restore(state, 0, [])
    resumed.open()
    assert sorted({ticket.task for ticket in started(resumed)}) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("stream", "complaint"),
    [
        ({"weight": -1}, r"scheduling\.mix: x\.weight: expected 0 or more, found -1"),
        ({"weight": 0}, r"scheduling\.mix: expected at least one weight above 0"),
        ({"first": 10**9}, r"scheduling\.mix: x\.first: training tasks are 0 to 999999999, found 1000000000"),
        ({"first": 10**9 - 5, "count": 6}, r"scheduling\.mix: x\.count: expected 1 to 5, .* found 6"),
        ({"count": 0}, r"scheduling\.mix: x\.count: expected 1 to 1000000000, .* found 0"),
        ({"turns": 0}, r"scheduling\.mix: x\.turns: expected 1 or more, found 0"),
        ({"share": 1}, r"scheduling\.mix"),
    ],
)
def test_a_job_with_impossible_streams_is_refused_by_name(stream: dict[str, int], complaint: str) -> None:
    with pytest.raises(JobError, match=complaint):
        convert({"scheduling": {"mix": {"x": stream}}}, "job.yaml", [])


def test_a_stream_with_a_name_that_affinity_reads_otherwise_is_refused() -> None:
    for name in ("default", "advice"):
        with pytest.raises(JobError, match=rf"scheduling\.mix\.{name}: this name means something else"):
            convert({"scheduling": {"mix": {name: {}}}}, "job.yaml", [])


def test_tickets_say_which_stream_they_are_of_where_the_job_has_named_any() -> None:
    mixed = RollingScheduler(rules(alpha=1), Ledger(), Mix({"easy": TaskStream(), "hard": TaskStream(first=100)}))
    plain = RollingScheduler(rules(alpha=1), Ledger())
    for made in (mixed, plain):
        made.open()
    streams = {ticket.group: ticket.stream for ticket in started(mixed)}
    assert [streams[group] for group in sorted(streams)][:4] == ["easy", "hard", "easy", "hard"]
    assert {ticket.stream for ticket in started(plain)} == {""}


def test_a_stream_has_its_own_class_or_its_environments_or_the_default() -> None:
    def declared(affinity: dict[str, str]) -> dict[str, str]:
        tree = {"environment": {"name": "frozenlake"}, "rollout": {"affinity": affinity}}
        return declared_classes(convert({**tree, "scheduling": {"mix": {"easy": {}, "hard": {}}}}, "job.yaml", []))

    assert declared({"hard": "H800", "frozenlake": "H20", "default": "L40S"}) == {
        "easy": "H20",
        "hard": "H800",
        "frozenlake": "H20",
        "default": "L40S",
    }
    assert declared({"hard": "H800", "default": "L40S"}) == {"hard": "H800", "default": "L40S"}
    assert declared({}) == {}


def test_credits_sum_to_nothing() -> None:
    mix = Mix({"a": TaskStream(weight=1.0), "b": TaskStream(weight=2.0), "c": TaskStream(weight=4.0)})
    for _ in range(50):
        mix.next()
        assert sum(state.credit for state in mix.state().values()) == pytest.approx(0.0, abs=1e-9)
    assert list(accumulate(mix.admitted.values()))[-1] == 50
