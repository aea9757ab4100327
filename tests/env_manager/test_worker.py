"""The worker's actor around a user's environment and reward function."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from actors.core import Node, Ref
from actors.env.messages import CloseEnv, ResetDone, ResetEnv, ScoreDone, ScoreWith, StepDone, StepEnv
from actors.env.protocol import Observation
from actors.env.workbench import EnvironmentFailed, UnknownInstance, Workbench
from actors.env.worker import EnvWorker
from actors.settings import EnvironmentSettings, RewardSettings
from tests.support.loops import run
from tests.trainer_actor.support import trajectory

SOURCE = """
import threading

from actors.env.protocol import Observation, Step


class Countdown:
    system_prompt = "Count."

    def reset(self, task):
        self.left = task
        return Observation(f"{self.left} in {threading.current_thread().name}", ("a",))

    def step(self, action):
        if action == "explode":
            raise KeyError("boom")
        self.left -= 1
        return Step(Observation(str(self.left)), reward=0.5, terminated=self.left == 0)


def double(trajectory):
    return 2 * trajectory.env_return
"""


@pytest.fixture(scope="module")
def job_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests: a module of one name is imported once."""
    directory = tmp_path_factory.mktemp("job")
    (directory / "countdown_env.py").write_text(SOURCE)
    return directory


@asynccontextmanager
async def worker(directory: Path) -> AsyncIterator[tuple[Node, Ref]]:
    bench = Workbench(
        EnvironmentSettings(name="countdown_env:Countdown"), directory, RewardSettings(function="countdown_env:double")
    )
    with ThreadPoolExecutor(1, "environment") as thread:
        async with Node("worker-0") as node:
            yield node, await node.spawn(lambda: EnvWorker(bench, thread), "worker")


def test_an_episode_is_played_in_the_environments_own_thread(job_directory: Path) -> None:
    async def test() -> None:
        async with worker(job_directory) as (node, ref):
            reset = await node.ask(ref, ResetEnv("t1", 2), ResetDone, timeout_s=5)
            assert reset == ResetDone(Observation("2 in environment_0", ("a",)), "Count.")
            for left, over in ((1, False), (0, True)):
                done = await node.ask(ref, StepEnv("t1", "a"), StepDone, timeout_s=5)
                assert (done.step.observation.text, done.step.terminated) == (str(left), over)
            assert (done.success, done.env_return) == (True, 1.0)

    run(test())


def test_episodes_side_by_side_do_not_disturb_each_other_and_a_failure_is_one_episodes(job_directory: Path) -> None:
    async def test() -> None:
        async with worker(job_directory) as (node, ref):
            for ticket, task in (("t1", 5), ("t2", 9)):
                await node.ask(ref, ResetEnv(ticket, task), ResetDone, timeout_s=5)
            with pytest.raises(EnvironmentFailed, match="t1, task 5, step 1: KeyError: 'boom'"):
                await node.ask(ref, StepEnv("t1", "explode"), StepDone, timeout_s=5)
            done = await node.ask(ref, StepEnv("t2", "a"), StepDone, timeout_s=5)
            assert done.step.observation.text == "8"

    run(test())


def test_a_closed_episode_cannot_be_played_on(job_directory: Path) -> None:
    async def test() -> None:
        async with worker(job_directory) as (node, ref):
            await node.ask(ref, ResetEnv("t1", 5), ResetDone, timeout_s=5)
            node.tell(ref, CloseEnv("t1"))
            with pytest.raises(UnknownInstance, match="t1 is not here"):
                await node.ask(ref, StepEnv("t1", "a"), StepDone, timeout_s=5)

    run(test())


def test_a_trajectory_is_scored_by_the_jobs_function(job_directory: Path) -> None:
    async def test() -> float:
        async with worker(job_directory) as (node, ref):
            message = ScoreWith(trajectory("t1", reward=1.5))
            return (await node.ask(ref, message, ScoreDone, timeout_s=5)).reward

    assert run(test()) == 3.0
