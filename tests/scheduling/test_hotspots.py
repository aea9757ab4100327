"""Migrations away from hot GPUs: by hand, and against a simulated cluster in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.virtual_time import run
from coordinator.scheduling.hotspots import HotSpots, Migration, Reading

# ---- by hand -------------------------------------------------------------------------------------------------------


def reading(gpu: str, at_s: float, utilisation: float, trajectories: int, hardware_class: str = "H800") -> Reading:
    return Reading(gpu, hardware_class, at_s, utilisation, trajectories)


def told(spots: HotSpots, seconds: range, loads: Sequence[tuple[str, float, int]]) -> list[Migration]:
    """The same readings every second; returns what was decided meanwhile."""
    decided = []
    for second in seconds:
        spots.note(reading(gpu, float(second), utilisation, count) for gpu, utilisation, count in loads)
        decided += spots.decide(float(second))
    return decided


def moves(migrations: list[Migration]) -> list[tuple[str, str, int]]:
    return [(each.source, each.target, each.trajectories) for each in migrations]


def test_less_than_ten_seconds_of_heat_move_nothing_and_ten_do() -> None:
    loads = [("a", 0.95, 19), ("b", 0.25, 5)]  # 5% each: after 7 moves both are at 60%
    spots = HotSpots()
    assert told(spots, range(10), loads) == []
    assert moves(told(spots, range(10, 11), loads)) == [("a", "b", 7)]


def test_one_cool_reading_begins_the_ten_seconds_anew() -> None:
    loads = [("a", 0.95, 19), ("b", 0.25, 5)]
    spots = HotSpots()
    told(spots, range(8), loads)
    assert told(spots, range(8, 9), [("a", 0.85, 17), ("b", 0.25, 5)]) == []
    assert told(spots, range(9, 19), loads) == []
    assert moves(told(spots, range(19, 20), loads)) == [("a", "b", 7)]


def test_between_cool_and_hot_nothing_happens() -> None:
    assert told(HotSpots(), range(60), [("a", 0.89, 18), ("b", 0.1, 2)]) == []


def test_a_gpu_above_the_cool_mark_receives_nothing_and_people_are_told() -> None:
    spots = HotSpots()
    assert told(spots, range(60), [("a", 0.95, 19), ("b", 0.75, 15)]) == []
    assert spots.stuck == {"a": "no other GPU is below 70%"}


def test_several_targets_are_filled_to_one_level_at_once() -> None:
    """A saturated source of 24 trajectories, which cost 5% elsewhere: 120% asked of it. With 20% and 40% that is 180%
    of three: 60% each, and 8 and 4 trajectories move."""
    loads = [("a", 1.0, 24), ("b", 0.2, 4), ("c", 0.4, 8)]
    assert sorted(moves(told(HotSpots(), range(12), loads))) == [("a", "b", 8), ("a", "c", 4)]


def test_no_target_is_filled_above_the_mark_though_the_level_is_higher() -> None:
    """40 trajectories at 5%: 200%, and 20%: the level would be 110%; b takes 12 trajectories to be at 80%."""
    assert moves(told(HotSpots(), range(12), [("a", 1.0, 40), ("b", 0.2, 4)])) == [("a", "b", 12)]


def test_a_trajectory_costs_each_class_what_it_is_seen_to_cost_there() -> None:
    """An H20 where one costs 10%: 20% of 2. The H800 at 95% of 19: after 5 moves both are at 70%."""
    spots = HotSpots()
    decided: list[Migration] = []
    for second in range(12):
        at = float(second)
        spots.note([reading("a", at, 0.95, 19), reading("b", at, 0.2, 2, "H20")])
        decided += spots.decide(at)
    assert moves(decided) == [("a", "b", 5)]


def test_who_has_received_gives_nothing_for_a_minute_and_who_gave_receives_nothing() -> None:
    spots = HotSpots()
    told(spots, range(12), [("a", 0.95, 19), ("b", 0.25, 5)])
    assert told(spots, range(12, 65), [("a", 0.3, 6), ("b", 0.95, 19)]) == []
    assert moves(told(spots, range(65, 85), [("a", 0.3, 6), ("b", 0.95, 19)])) == [("b", "a", 6)]


def test_a_gpu_that_is_silent_is_neither_hot_nor_a_target() -> None:
    spots = HotSpots()
    spots.note([reading("b", 0.0, 0.1, 2)])
    assert told(spots, range(1, 20), [("a", 0.95, 19)]) == []
    assert spots.stuck == {"a": "no other GPU is below 70%"}
    gaps = HotSpots()
    for second in (0, 1, 8, 9, 10):
        gaps.note([reading("a", float(second), 0.95, 19), reading("b", float(second), 0.2, 4)])
        assert gaps.decide(float(second)) == []  # nobody knows how it was from 1 to 8


def test_readings_that_arrive_late_are_left_out() -> None:
    spots = HotSpots()
    told(spots, range(5), [("a", 0.95, 19), ("b", 0.25, 5)])
    spots.note([reading("a", 1.5, 0.1, 2)])
    assert moves(told(spots, range(5, 12), [("a", 0.95, 19), ("b", 0.25, 5)])) == [("a", "b", 7)]


def test_a_gpu_that_is_gone_is_forgotten() -> None:
    spots = HotSpots()
    told(spots, range(8), [("a", 0.95, 19), ("b", 0.25, 5)])
    spots.forget("b")
    assert told(spots, range(8, 12), [("a", 0.95, 19)]) == []


def test_what_an_earlier_leader_has_ordered_is_kept_to() -> None:
    """b took at 0 s, and a gave: neither may do the opposite before 60 s."""
    loads = [("a", 0.3, 6), ("b", 0.95, 19)]
    spots = HotSpots()
    told(spots, range(20, 21), loads)
    spots.remember("a", gave_at=0.0, took_at=None)
    spots.remember("b", gave_at=None, took_at=0.0)
    spots.remember("unknown", gave_at=0.0, took_at=0.0)
    assert told(spots, range(21, 60), loads) == []
    assert moves(told(spots, range(60, 70), loads)) == [("b", "a", 6)]


# ---- against a cluster in virtual time -----------------------------------------------------------------------------


class Skew(msgspec.Struct, frozen=True):
    """Where trajectories are at the beginning, and what each costs of its GPU's time."""

    trajectories: list[int]
    costs: list[float]
    noise: float
    lost: float  # share of readings
    seed: int


class Pretended:
    """GPUs on which trajectories go on turn by turn and move at their next one; each that ends is followed by another
    on the same GPU, as sticky routing would have it."""

    def __init__(self, skew: Skew) -> None:
        self._skew = skew
        self._chance = random.Random(skew.seed)
        self.counts = list(skew.trajectories)
        self.migrations: list[tuple[float, Migration]] = []
        self.history: list[tuple[float, list[float]]] = []
        self._spots = HotSpots()

    def utilisations(self) -> list[float]:
        return [min(1.0, count * cost) for count, cost in zip(self.counts, self._skew.costs, strict=True)]

    async def go_on(self, seconds: int) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(seconds):
            await asyncio.sleep(1.0)
            self.history.append((loop.time(), self.utilisations()))
            self._spots.note(self._readings(loop.time()))
            for migration in self._spots.decide(loop.time()):
                self.migrations.append((loop.time(), migration))
                for _ in range(migration.trajectories):
                    loop.call_later(self._chance.uniform(0.1, 5.0), self._move, migration)

    def _move(self, migration: Migration) -> None:
        self.counts[int(migration.source)] -= 1
        self.counts[int(migration.target)] += 1

    def _readings(self, now: float) -> list[Reading]:
        readings = []
        for index, utilisation in enumerate(self.utilisations()):
            seen = min(1.0, max(0.0, utilisation + self._chance.gauss(0.0, self._skew.noise)))
            if self._chance.random() >= self._skew.lost:
                readings.append(Reading(str(index), "H800", now, seen, self.counts[index]))
        return readings


def watched(skew: Skew, seconds: int = 150) -> Pretended:
    async def main() -> Pretended:
        made = Pretended(skew)
        await made.go_on(seconds)
        return made

    return run(main(), seed=skew.seed)


def check_evened_out(made: Pretended) -> None:
    """After a minute no GPU is hot any more; nothing went to and fro; and nothing moves once it is even."""
    for at, utilisations in made.history:
        if at >= 60.0:
            assert max(utilisations) <= 0.9, f"hot at {at:.0f} s: {utilisations}"
    givers = {migration.source for _, migration in made.migrations}
    takers = {migration.target for _, migration in made.migrations}
    assert not givers & takers, "a GPU gave and received"
    assert all(at < 60.0 for at, _ in made.migrations)


@pytest.mark.parametrize("count", [2, 4, 16, 32])
def test_a_load_on_one_gpu_is_evened_out_within_a_minute_without_oscillation(count: int) -> None:
    """Trajectories for 60% of every GPU, all of them on the first one beside a few elsewhere."""
    few = 2
    skew = Skew(
        [12 * count - few * (count - 1), *[few] * (count - 1)], [0.05] * count, noise=0.02, lost=0.05, seed=count
    )
    made = watched(skew)
    assert made.utilisations()[0] <= 0.9
    assert sum(made.counts) == 12 * count
    check_evened_out(made)


@given(
    st.builds(
        Skew,
        trajectories=st.lists(st.integers(0, 40), min_size=3, max_size=12),
        costs=st.just([]),
        noise=st.sampled_from([0.0, 0.02]),
        lost=st.sampled_from([0.0, 0.1]),
        seed=st.integers(0, 1000),
    ),
    st.floats(0.4, 0.6),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_whatever_the_skew_it_is_evened_out_where_there_is_room(skew: Skew, load: float) -> None:
    """``load`` of what all GPUs together can do."""
    count = len(skew.trajectories)
    cost = load * count / max(1, sum(skew.trajectories))
    if cost > 0.1:  # so few trajectories that one of them is a tenth of a GPU: no level can be met
        cost = 0.05
    check_evened_out(watched(msgspec.structs.replace(skew, costs=[cost] * count)))


def test_where_all_are_hot_nothing_moves_ever() -> None:
    assert watched(Skew([30, 30, 30], [0.05] * 3, noise=0.02, lost=0.0, seed=1)).migrations == []
