"""The decision alone: traces of load by hand, one look a second, and what must come of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from coordinator.resources.rebinding import Move, PoolLoad, State, Task, decide

HOME = {"math": Task("H20", "H20"), "games": Task("H800", "H800")}


def steady(h20: dict[str, int], h800: dict[str, int]) -> dict[str, PoolLoad]:
    """Both pools have 100 places."""
    return {"H20": PoolLoad(100, h20), "H800": PoolLoad(100, h800)}


def looks(
    state: State, loads: Callable[[int, State], dict[str, PoolLoad]], seconds: int, start: int = 0
) -> Iterator[tuple[int, Move, State]]:
    for second in range(start, start + seconds):
        state, move = decide(state, loads(second, state), float(second))
        if move is not None:
            yield second, move, state


def test_a_task_moves_only_after_ten_seconds_of_full_here_and_calm_there() -> None:
    (found,) = looks(State(HOME), lambda second, state: steady({"math": 60, "web": 35}, {"games": 10}), 20)
    second, move, _ = found
    assert second == 10
    assert (move.task, move.origin, move.to) == ("math", "H20", "H800")
    assert move.reason == "H20 is full (load 0.95), H800 is calm (load 0.10)"


def test_a_break_of_one_second_begins_the_ten_again() -> None:
    def flickering(second: int, state: State) -> dict[str, PoolLoad]:
        return steady({"math": 95 if second % 9 else 80}, {"games": 10})

    assert list(looks(State(HOME), flickering, 600)) == []


def test_nothing_moves_between_the_marks_nor_into_a_pool_that_would_be_fuller() -> None:
    assert list(looks(State(HOME), lambda second, state: steady({"math": 89}, {"games": 10}), 600)) == []
    assert list(looks(State(HOME), lambda second, state: steady({"math": 95}, {"games": 51}), 600)) == []
    # 95 would go to a pool with 40: 1.35 there instead of 0.95 here
    assert list(looks(State(HOME), lambda second, state: steady({"math": 95}, {"games": 40}), 600)) == []


def test_a_load_that_does_not_change_moves_a_task_once_and_not_back() -> None:
    """The pool that it left is calm only because it left."""

    def following(second: int, state: State) -> dict[str, PoolLoad]:
        pools: dict[str, dict[str, int]] = {"H20": {}, "H800": {}}
        for task, requests in {"math": 60, "web": 40, "games": 5}.items():
            pools[state.tasks[task].bound][task] = requests
        return steady(pools["H20"], pools["H800"])

    three = State({**HOME, "web": Task("H20", "H20")})
    moves = list(looks(three, following, 3600))
    assert [(second, move.task, move.to) for second, move, _ in moves] == [(10, "web", "H800")]


def test_a_task_goes_home_once_what_drove_it_out_is_gone() -> None:
    def shifting(second: int, state: State) -> dict[str, PoolLoad]:
        pools: dict[str, dict[str, int]] = {"H20": {}, "H800": {}}
        for task, requests in {"math": 60 if second < 300 else 20, "web": 40, "games": 5}.items():
            pools[state.tasks[task].bound][task] = requests
        return steady(pools["H20"], pools["H800"])

    three = State({**HOME, "web": Task("H20", "H20")})
    moves = list(looks(three, shifting, 1200))
    assert [(second, move.task, move.to) for second, move, _ in moves] == [(10, "web", "H800"), (310, "web", "H20")]
    assert moves[1][1].reason == "H20 is calm again (load 0.20)"


def test_a_task_rests_for_a_minute_after_a_move() -> None:
    """The load turns round as soon as it has moved: it may follow after sixty seconds, not earlier."""

    def turning(second: int, state: State) -> dict[str, PoolLoad]:
        bound = state.tasks["math"].bound
        mine = {"math": 60, "others": 35}
        return steady(mine, {}) if bound == "H20" else steady({}, {"math": 20, "games": 75})

    moves = list(looks(State({"math": HOME["math"]}), turning, 200))
    assert [(second, move.to) for second, move, _ in moves][:2] == [(10, "H800"), (70, "H20")]


def test_the_task_with_the_fewest_requests_moves_first() -> None:
    three = State({**HOME, "web": Task("H20", "H20")})
    (first, *_) = looks(three, lambda second, state: steady({"math": 80, "web": 15}, {}), 20)
    assert first[1].task == "web"
