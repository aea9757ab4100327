"""Tasks and success."""

from actors.env.protocol import Observation, Step, evaluation_task, is_held_out, succeeded, training_task


def test_training_and_evaluation_never_share_a_task() -> None:
    indices = [0, 1, 999_999_999, 1_000_000_000, 1_147_483_647, 1_147_483_648, 10**12]
    training = [training_task(index) for index in indices]
    evaluation = [evaluation_task(index) for index in indices]
    assert training == [0, 1, 999_999_999, 0, 147_483_647, 147_483_648, 0]
    assert evaluation[:5] == [1_000_000_000, 1_000_000_001, 1_999_999_999, 2_000_000_000, 2**31 - 1]
    assert evaluation[5] == 1_000_000_000
    assert not any(is_held_out(task) for task in training)
    assert all(is_held_out(task) and task < 2**31 for task in evaluation)


def test_success_is_the_environments_word_or_else_a_positive_return() -> None:
    silent, yes, no = (Step(Observation(""), success=word) for word in (None, True, False))
    assert succeeded(silent, 1.0)
    assert not succeeded(silent, 0.0)
    assert succeeded(yes, -1.0)
    assert not succeeded(no, 5.0)
    assert not succeeded(None, 0.0)
