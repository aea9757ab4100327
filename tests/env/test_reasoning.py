"""Questions of reasoning-gym, the calculator beside them, and the split of both by content."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from actors.env.calculator import CannotCompute, compute
from actors.env.framing import ChatFraming
from actors.env.protocol import Observation, evaluation_task, training_task
from actors.env.reasoning import Question, WithCalculator, answer_in
from actors.env.recorder import TrajectoryRecorder
from actors.env.splits import HELD_OUT_SHARE, OneSided, draws, on_the_right_side
from actors.env.tokenizers import HuggingFaceTokenizer

pytest.importorskip("reasoning_gym", reason="the extra 'reasoning' is not installed")

ONLY_PROBLEM = "3 + 1"
"""Its digest begins with 0x19, below 0.2 * 256: held out."""

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def sum_of(text: str) -> int:
    """The answer to a chain_sum question, worked out by splitting it at its blanks."""
    first, *rest = text.split(": ")[1].removesuffix(" =").split()
    total = int(first)
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        total += int(term) if sign == "+" else -int(term)
    return total


def test_the_right_sum_is_rewarded_in_full_and_a_wrong_one_not_at_all() -> None:
    environment = Question(config=SMALL)
    answer = sum_of(environment.reset(7).text)
    right = environment.step(f" {answer}\n")
    assert (right.reward, right.success, right.terminated) == (1.0, True, True)
    environment.reset(7)
    wrong = environment.step(str(answer + 1000))
    assert (wrong.success, wrong.terminated) == (False, True)
    assert wrong.observation == Observation(f"Wrong: {answer}.")


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("The answer is 75.", "75"),
        ("75, I think", "75"),
        ("3, 4, then -7,", "-7"),
        ("1,234,567", "1,234,567"),
        ("about 0.5", "0.5"),
        (" none \n", "none"),
    ],
)
def test_the_answer_is_the_last_number_without_what_follows_it(reply: str, number: str) -> None:
    assert answer_in(reply) == number


def test_a_task_poses_the_same_question_in_every_instance() -> None:
    one, other = Question(config=SMALL), Question(config=SMALL)
    assert [one.reset(task).text for task in range(50)] == [other.reset(task).text for task in reversed(range(50))][
        ::-1
    ]


def test_no_held_out_question_is_ever_trained_on() -> None:
    environment = Question(config=SMALL)  # 10 * 10 * 2 different questions: seeds alone would not keep them apart
    trained = {environment.reset(training_task(index)).text for index in range(2000)}
    held_out = {environment.reset(evaluation_task(index)).text for index in range(1000)}
    assert not trained & held_out
    assert len(trained | held_out) == 200
    assert len(held_out) == pytest.approx(HELD_OUT_SHARE * 200, abs=25)


def test_a_generator_with_a_single_problem_is_refused_by_name() -> None:
    with pytest.raises(OneSided, match="task 5: 1000 problems were drawn and none is for training"):
        next(seed for seed in draws(5) if on_the_right_side(5, ONLY_PROBLEM))


def test_the_calculator_answers_once_and_the_answer_counts() -> None:
    environment = WithCalculator(config=SMALL)
    answer = sum_of(environment.reset(3).text)
    told = environment.step("calc: 12 + 30 - 4 = 40")
    assert (told.observation.text, told.terminated, told.reward) == ("38", False, 0.0)
    assert told.metrics == {"tool_calls": 1.0}
    again = environment.step("calc: 1 + 1 + 99999")  # no call is left: this is the answer
    assert again.terminated
    assert again.success is False
    environment.reset(3)
    assert environment.step(str(answer)).metrics == {"tool_calls": 0.0}


def test_a_call_that_cannot_be_computed_is_told_and_counted() -> None:
    environment = WithCalculator(config=SMALL)
    environment.reset(3)
    told = environment.step("calc: twelve")
    assert told.observation.text.startswith("Error: ")
    assert told.metrics == {"tool_calls": 1.0, "tool_errors": 1.0}
    assert not told.terminated


def test_a_dataset_that_does_not_exist_or_takes_other_settings_is_named() -> None:
    with pytest.raises(ValueError, match="no_such_dataset"):
        Question(dataset="no_such_dataset")
    with pytest.raises(ValueError, match=r"chain_sum: .*max_term"):
        Question(config={"max_term": 3})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2+3", "5"),
        ("12 + 30 - 4 =", "38"),
        ("-7 - (3 - 10)", "0"),
        ("0.1 + 0.2", "0.3"),
        ("123456789 * 1000", "123456789000"),
        ("1000000000000000000000000000000 + 1", "1000000000000000000000000000001"),
    ],
)
def test_the_calculator_computes_exactly(text: str, value: str) -> None:
    assert compute(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2 +",
        "x",
        "2 / 3",
        "2 ** 9",
        "1e3",
        "0x10",
        "1_000",
        "__import__('os')",
        "True",
        "1j",
        "(" * 150,
        "1 " * 200,
        "'a' * 3",
        "\0",
    ],
)
def test_what_is_no_sum_is_refused(text: str) -> None:
    with pytest.raises(CannotCompute):
        compute(text)


def test_a_calculator_cannot_be_made_to_work_for_long() -> None:
    with pytest.raises(CannotCompute):
        compute("9e999999 * 9e999999 + 1")


def test_what_the_calculator_says_is_context_and_never_trained_on(model_directory: Path) -> None:
    """The road of a real episode: environment, chat framing, recorder; the policy's words are scripted."""
    tokenizer = HuggingFaceTokenizer(model_directory)
    framing, recorder = ChatFraming(tokenizer), TrajectoryRecorder("t", 0, 3, 1.0)
    environment = WithCalculator(config=SMALL)
    observation = environment.reset(3)
    recorder.start(framing.opening(environment.system_prompt, observation.text), observation.text)
    sampled = []
    for words in ("calc: 700 + 7<|im_end|>", "The answer is 707.<|im_end|>"):
        tokens = tokenizer.encode(words)
        sampled += tokens.tolist()
        zeros = np.zeros(len(tokens))
        recorder.sampled(tokens, zeros.astype(np.float32), zeros.astype(np.int32), None, words)
        step = environment.step(framing.action(tokens))
        recorder.observed(framing.following(step.observation.text, int(tokens[-1])), step.observation.text)
        if step.terminated:
            break
    (segment,) = recorder.finish(env_return=0.0, reward=0.0, success=False).segments
    trained = segment.loss_mask == 1
    assert segment.tokens[trained].tolist() == sampled
    told = tokenizer.encode("<|im_start|>user\n707<|im_end|>").tolist()
    tokens = segment.tokens.tolist()
    (place,) = [i for i in range(len(tokens)) if tokens[i : i + len(told)] == told]
    assert not trained[place : place + len(told)].any()
