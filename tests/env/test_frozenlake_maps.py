"""Random maps: playable, the same every time, and apart by their content."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from actors.env.frozenlake import FrozenLake
from actors.env.frozenlake_maps import RandomMaps, is_held_out_map
from actors.env.protocol import FIRST_EVALUATION_TASK, LAST_TASK, evaluation_task, training_task
from coordinator.commands.eval import FIRST_FRESH

TASKS = 4_000


def drawn(tasks: Sequence[int]) -> list[list[str]]:
    maps = RandomMaps(4, 0.8)
    return [maps.draw(task) for task in tasks]


def shortest_way(rows: Sequence[str]) -> str | None:
    """Breadth first from S to G, by columns and rows of the text alone."""
    tiles = {(x, y): tile for y, row in enumerate(rows) for x, tile in enumerate(row)}
    start = next(place for place, tile in tiles.items() if tile == "S")
    ways = {start: ""}
    frontier = [start]
    while frontier:
        x, y = frontier.pop(0)
        if tiles[x, y] == "G":
            return ways[x, y]
        for letter, place in zip("LDRU", ((x - 1, y), (x, y + 1), (x + 1, y), (x, y - 1)), strict=True):
            if tiles.get(place, "H") != "H" and place not in ways:
                ways[place] = ways[x, y] + letter
                frontier.append(place)
    return None


def transposed(rows: Sequence[str]) -> list[str]:
    return ["".join(rows[y][x] for y in range(len(rows))) for x in range(len(rows[0]))]


def test_no_map_of_a_held_out_task_nor_its_mirror_image_is_ever_drawn_by_a_training_task() -> None:
    trained = {tuple(rows) for rows in drawn([training_task(index) for index in range(TASKS)])}
    during = drawn([evaluation_task(index) for index in range(TASKS // 4)])
    afterwards = drawn([evaluation_task(FIRST_FRESH + index) for index in range(TASKS // 4)])
    unseen = {tuple(rows) for rows in during + afterwards}
    assert len(trained) > 500
    assert len(unseen) > 100
    assert not trained & unseen
    assert not trained & {tuple(transposed(rows)) for rows in unseen}


def test_every_map_falls_on_one_side_whatever_task_draws_it_and_a_fifth_of_them_is_held_out() -> None:
    maps = [
        [f"S{a}{b}{c}", *("".join(middle[i : i + 4]) for i in (0, 4)), f"{d}{e}{f}G"]
        for a, b, c, d, e, f in product("FH", repeat=6)
        for middle in product("FH", repeat=8)
    ]
    solvable = [rows for rows in maps if shortest_way(rows) is not None]
    held_out = [rows for rows in solvable if is_held_out_map(rows)]
    assert all(is_held_out_map(transposed(rows)) for rows in held_out)
    assert 0.18 < len(held_out) / len(solvable) < 0.22
    assert is_held_out_map(drawn([FIRST_EVALUATION_TASK])[0])
    assert not is_held_out_map(drawn([0])[0])


def test_the_split_stays_what_it_is() -> None:
    """A change would put maps that published policies were trained on among the held-out ones."""
    assert not is_held_out_map(["SFFF", "FFFF", "FFFF", "FFFG"])
    assert is_held_out_map(["SFFF", "FFFH", "FFFF", "HFFG"])


def test_every_map_has_a_way_to_the_goal_that_the_game_accepts() -> None:
    lake = FrozenLake(map_name="random")
    for task in [*range(300), *range(FIRST_EVALUATION_TASK, FIRST_EVALUATION_TASK + 300), LAST_TASK]:
        rows = lake.reset(task).text.split("\n")[0].split(" ")
        assert [len(row) for row in rows] == [4, 4, 4, 4]
        assert (rows[0][0], rows[3][3]) == ("S", "G")
        way = shortest_way(rows)
        assert way is not None, rows
        steps = [lake.step(letter) for letter in way]
        assert [step.reward for step in steps] == [0.0] * (len(way) - 1) + [1.0]
        assert (steps[-1].terminated, steps[-1].success) == (True, True)


def test_a_task_draws_the_same_map_in_every_object_and_order() -> None:
    tasks = [*range(50), *range(FIRST_EVALUATION_TASK, FIRST_EVALUATION_TASK + 50)]
    first, second = FrozenLake(map_name="random"), FrozenLake(map_name="random")
    texts = [first.reset(task).text for task in tasks]
    assert [second.reset(task).text for task in reversed(tasks)] == texts[::-1]
    assert len(set(texts)) > 50


def test_maps_are_the_generators_own() -> None:
    for task in range(100):
        rows = generate_random_map(4, 0.8, seed=task)
        if not is_held_out_map(rows):
            assert drawn([task]) == [rows]


def test_other_sizes_and_densities_are_drawn_and_played() -> None:
    lake = FrozenLake(map_name="random", size=6, frozen=0.9)
    rows = lake.reset(5).text.split("\n")[0].split(" ")
    assert [len(row) for row in rows] == [6] * 6
    assert lake.reset(5).text.endswith("\na1")


def test_a_side_without_maps_is_told_instead_of_searched_for_ever() -> None:
    only = ["SF", "FG"]  # without holes there is one map
    missing = (0, "for training") if is_held_out_map(only) else (FIRST_EVALUATION_TASK, "held out")
    with pytest.raises(
        ValueError, match=rf"size: 2, frozen: 1\.0: task .*: 1000 problems were drawn and none is {missing[1]}"
    ):
        RandomMaps(2, 1.0).draw(missing[0])


def test_a_step_before_the_first_reset_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match="expected reset before it"):
        FrozenLake(map_name="random").step("R")
