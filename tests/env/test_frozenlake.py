"""The text game against Gymnasium's own environment."""

import gymnasium
import pytest

from actors.env.frozenlake import FrozenLake


def test_the_first_observation_shows_the_map_once_and_later_ones_only_the_position() -> None:
    lake = FrozenLake()
    first = lake.reset(0)
    assert first.text == "SFFF FHFH FFFH HFFG\na1"
    assert first.actions == ("L", "D", "R", "U")
    assert lake.step("R").observation.text == "b1"


def test_the_shortest_path_reaches_the_goal_with_reward_one() -> None:
    lake = FrozenLake()
    lake.reset(3)
    steps = [lake.step(action) for action in "DDRRDR"]
    assert [step.observation.text for step in steps] == ["a2", "a3", "b3", "c3", "c4", "d4"]
    assert [step.reward for step in steps] == [0, 0, 0, 0, 0, 1]
    assert [step.terminated for step in steps] == [False] * 5 + [True]
    assert steps[-1].success is True
    assert steps[0].success is None


def test_a_hole_ends_the_episode_without_reward_or_success() -> None:
    lake = FrozenLake()
    lake.reset(0)
    lake.step("R")
    fallen = lake.step("D")
    assert (fallen.observation.text, fallen.reward, fallen.terminated, fallen.success) == ("b2", 0.0, True, False)


@pytest.mark.parametrize("slippery", [False, True])
def test_it_moves_exactly_as_gymnasium_does_under_the_same_seed(slippery: bool) -> None:
    reference = gymnasium.make("FrozenLake-v1", map_name="4x4", is_slippery=slippery)
    lake = FrozenLake(slippery=slippery)
    for seed in range(40):
        reference.reset(seed=seed)
        lake.reset(seed)
        for turn in range(30):
            number = (seed * 7 + turn * turn * 3 + turn // 2) % 4
            state, reward, terminated, _, _ = reference.step(number)
            step = lake.step("LDRU"[number])
            assert step.observation.text == "abcd"[state % 4] + "1234"[state // 4]
            assert step.reward == reward
            assert step.terminated == terminated
            if terminated:
                break


def test_other_text_wastes_the_turn_and_lower_case_or_blanks_are_forgiven() -> None:
    lake = FrozenLake()
    lake.reset(0)
    assert lake.step("north").observation.text == "a1"
    assert lake.step(" r\n").observation.text == "b1"


def test_an_explicit_map_is_played() -> None:
    lake = FrozenLake(map=["SF", "HG"])
    assert lake.reset(0).text == "SF HG\na1"
    lake.step("R")
    assert lake.step("D").success is True


def test_the_safe_ways_follow_the_position_where_asked_for() -> None:
    lake = FrozenLake(ways=True)
    assert lake.reset(0).text == "SFFF FHFH FFFH HFFG\na1.v>."
    walk = [lake.step(action).observation.text for action in "DDRRDR"]
    assert walk == ["a2.v.^", "a3..>^", "b3<v>.", "c3<v.^", "c4<.>^", "d4<..."]
    assert "the ways that are safe" in lake.system_prompt
    assert "safe:" not in FrozenLake.system_prompt


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"map_name": "5x5"}, "map_name: expected one of 4x4, 8x8 or random, found '5x5'"),
        ({"map": ["SF", "G"]}, "map: expected rows of one length, found lengths [2, 1]"),
        ({"map": ["SX", "FG"]}, "map: expected only the tiles S, F, H and G, found ['X']"),
        ({"map": ["SF", "FF"]}, "map: expected at least one goal (G), found none in ['SF', 'FF']"),
        ({"map": ["S" + "F" * 26, "G" * 27]}, "map: expected at most 26 columns, found 27"),
        ({"map_name": "random", "size": 1}, "size: expected 2 to 26 rows and columns, found 1"),
        ({"map_name": "random", "frozen": 0.0}, "frozen: expected a probability above 0 and at most 1, found 0.0"),
        ({"map": "SFFG"}, "map: expected a list of rows such as [SF, HG], found 'SFFG'"),
    ],
)
def test_a_map_that_cannot_be_played_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        FrozenLake(**options)  # type: ignore[arg-type]
    assert str(caught.value) == message
