"""Which demonstrations are imitated, which are held out, and in which order."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from actors.env.framing import TextFraming
from actors.env.recorder import TrajectoryRecorder
from actors.env.tokenizers import ByteTokenizer
from actors.settings import RolloutSettings, SftSettings, TrainSettings
from actors.trainer.dump import FORMAT, Dump, DumpFacts, Manifest
from actors.trajectory import Trajectory
from coordinator.job import Job, JobError, convert
from coordinator.sft import batch_of, load_demonstrations, select, split
from coordinator.train_only import FromDump, whole_groups


def trajectory(ticket: str, group: int = 0, env_return: float = 0.0) -> Trajectory:
    recorder = TrajectoryRecorder(ticket, group, task=0, temperature=1.0)
    recorder.start(np.array([1]), "?")
    recorder.sampled(np.array([2]), np.array([-1.0]), np.array([0]), None, "a")
    return recorder.finish(env_return=env_return, reward=env_return, success=env_return >= 1.0)


def tickets(trajectories: list[Trajectory]) -> list[str]:
    return [one.ticket for one in trajectories]


FIVE = [trajectory(name, env_return=value) for name, value in zip("abcde", (0.0, 2.0, 1.0, 2.0, -1.0), strict=True)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (SftSettings(), "abcde"),
        (SftSettings(select="successful"), "bcd"),
        (SftSettings(top_return=0.4), "bd"),
        (SftSettings(top_return=0.01), "b"),  # at least one; of equal returns the earlier
        (SftSettings(select="successful", top_return=0.5), "bd"),  # half of three, rounded up
    ],
)
def test_selection(settings: SftSettings, expected: str) -> None:
    assert tickets(select(FIVE, settings)) == list(expected)


def test_a_selection_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(JobError, match=r"sft\.select: none of the 1 recorded trajectories was a success"):
        select([FIVE[0]], SftSettings(select="successful"))


def test_whole_groups_are_held_out_and_nothing_is_lost() -> None:
    data = [trajectory(f"{group}.{member}", group) for member in range(4) for group in range(10)]
    train, held_out = split(data, 0.2, seed=5)
    assert len(held_out) == 8
    assert not {one.group for one in train} & {one.group for one in held_out}
    assert sorted(tickets(train + held_out)) == sorted(tickets(data))
    assert tickets(split(data, 0.2, seed=5)[1]) == tickets(held_out)
    assert {one.group for one in split(data, 0.2, seed=6)[1]} != {one.group for one in held_out}


def test_a_single_group_is_trained_on_and_a_small_share_still_holds_one_out() -> None:
    assert split(FIVE, 0.5, seed=0) == (FIVE, [])
    assert split([trajectory("a", 0), trajectory("b", 1)], 0.0, seed=0)[1] == []
    assert len(split([trajectory(str(group), group) for group in range(3)], 0.01, seed=0)[1]) == 1


def test_every_epoch_sees_everything_once_in_an_order_of_its_own() -> None:
    settings = SftSettings(batch_size=4)
    epochs = []
    for epoch in range(3):
        steps = [batch_of(epoch * 3 + step, 10, settings, seed=1) for step in range(3)]
        assert {number for number, _ in steps} == {epoch + 1}
        assert [len(indices) for _, indices in steps] == [4, 4, 2]
        epochs.append([index for _, indices in steps for index in indices])
    assert all(Counter(order) == Counter(range(10)) for order in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_chats_beyond_the_models_positions_and_selections_of_chats_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "d"}]}\n')
    framing = TextFraming(ByteTokenizer())
    short = convert({"policy": {"shape": {"max_positions": 4}}}, "job", [])
    assert len(load_demonstrations(path, short, framing).train) == 1
    longer = Job(policy=short.policy, rollout=RolloutSettings(max_tokens_per_turn=9))  # the end token comes on top
    with pytest.raises(JobError, match=r"sft\.data: chat 1 has 5 tokens, the policy 4 positions"):
        load_demonstrations(path, longer, framing)
    with pytest.raises(JobError, match=r"sft\.select, sft\.top_return: chats have no success"):
        load_demonstrations(path, Job(sft=SftSettings(select="successful")), framing)


@pytest.mark.parametrize("override", ["sft.top_return=0", "sft.top_return=1.1", "sft.held_out=1", "sft.held_out=-0.1"])
def test_impossible_shares_are_refused(override: str) -> None:
    with pytest.raises(JobError, match=override.partition("=")[0]):
        convert({}, "job", [override])


def dump_of(sizes: list[int]) -> Dump:
    data = [trajectory(f"{group}.{member}", group) for group, size in enumerate(sizes) for member in range(size)]
    return Dump(Path("dump"), Manifest(FORMAT, "job", "env", DumpFacts("bytes", 264)), data)


def test_batches_of_a_dump_are_its_whole_groups_in_order_from_the_beginning_again() -> None:
    job = Job(train=TrainSettings(groups_per_step=2, group_size=3))
    program = FromDump(dump_of([3, 3, 2, 3]), job)
    batches = [[group[0].group for group in program.batch(version, 2)] for version in range(3)]
    assert batches == [[0, 1], [3, 0], [1, 3]]
    assert program.describe() == "dump: dump, 3 groups, 9 trajectories; 1 groups of another size are left out"


def test_a_dump_that_makes_no_batch_is_refused() -> None:
    with pytest.raises(JobError, match=r"a step takes 3 groups of 4 .* found 2 such among 3 groups of 2 or 4$"):
        whole_groups(dump_of([4, 2, 4]), TrainSettings(groups_per_step=3, group_size=4))
