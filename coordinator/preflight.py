"""What can be checked before anything is started: user code imports and gets through one reset, one step and one
score, actions are single tokens, directories exist.

Invariant: a mistake in a job that can be seen from this process is one line and exit status 2, not a failed child; and
user code that does not return holds this up no longer than the job allows for a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import numpy as np

from actors.env.agents.bench import AgentBench
from actors.env.agents.conversation import Renderer
from actors.env.catalogue import EnvironmentUnavailable
from actors.env.framing import ActionNotOneToken, Framing, framing_for
from actors.env.protocol import evaluation_task
from actors.env.recorder import TrajectoryRecorder
from actors.env.tokenizers import TokenizerError, load_tokenizer
from actors.env.workbench import EnvironmentFailed, Workbench
from actors.policy import PolicyError
from actors.reward.functions import RewardFailed, RewardUnavailable
from actors.settings import AgentSettings
from actors.weight_files import check_weight_files
from coordinator.job import Job, JobError
from coordinator.observe.tracking.settings import TrackersUnusable, check_installed
from coordinator.resources.resolve import number, policy_facts

T = TypeVar("T")


def check_job(job: Job, job_directory: Path) -> None:
    """Raises ``JobError`` naming the setting."""
    framing = check_policy(job)
    if job.environment.agent is not None:
        check_agent(job, job.environment.agent, job_directory)
        return
    opening = _within(
        job.environment.step_timeout_s,
        f"environment.name: {job.environment.name}: importing it, making one, its first reset and step and the reward",
        lambda: _rehearsal(job, job_directory, framing),
    )
    limit = number(job.rollout.max_model_len)
    if opening + job.rollout.max_tokens_per_turn > limit:
        raise JobError(
            f"rollout.max_model_len: the first prompt alone has {opening} tokens; with "
            f"{job.rollout.max_tokens_per_turn} more the limit of {limit} is exceeded"
        )


def check_agent(job: Job, settings: AgentSettings, job_directory: Path) -> None:
    """The part of it that concerns an agent, which is made and not run: it needs an endpoint. Raises ``JobError``."""
    name = job.environment.name
    Renderer(load_tokenizer(job.policy), settings.tool_calls)
    try:
        _within(
            job.environment.step_timeout_s,
            f"environment.name: {name}: importing it and making one",
            lambda: AgentBench(job.environment, job_directory, job.reward),
        )
    except (RewardUnavailable, EnvironmentUnavailable) as error:
        raise JobError(str(error)) from None
    if find_spec("aiohttp") is None:
        raise JobError("environment.agent: the endpoint needs aiohttp, which is not installed here")


def check_policy(job: Job) -> Framing:
    """The part of it that concerns model and tokenizer; returns how texts become tokens. Raises ``JobError``."""
    facts = policy_facts(job)
    try:
        tokenizer = load_tokenizer(job.policy)
        framing = framing_for(tokenizer)
    except TokenizerError as error:
        raise JobError(f"policy.tokenizer: {error}") from None
    if tokenizer.vocab_size > facts.vocab_size:
        raise JobError(f"policy: the tokenizer has {tokenizer.vocab_size} ids, the model {facts.vocab_size} embeddings")
    if job.policy.path is not None:
        try:
            check_weight_files(Path(job.policy.path))
        except PolicyError as error:
            raise JobError(f"policy.path: {error}") from None
    return framing


def check_trackers(job: Job) -> None:
    """Whether what the job names is installed; only for what logs to them. Raises ``JobError``."""
    try:
        check_installed(job.trackers)
    except TrackersUnusable as error:
        raise JobError(str(error)) from None


def _rehearsal(job: Job, job_directory: Path, framing: Framing) -> int:
    """Play and score the first turn of the first held-out task; returns the length of its prompt, in tokens."""
    name = job.environment.name
    try:
        bench = Workbench(job.environment, job_directory, job.reward)
    except (RewardUnavailable, EnvironmentUnavailable) as error:
        raise JobError(str(error)) from None
    try:
        return _first_turn(bench, framing)
    except EnvironmentFailed as error:
        raise JobError(f"environment.name: {name} failed at its first {error.during}: {error.reason}") from None
    except ActionNotOneToken as error:
        raise JobError(f"environment.name: {name}: {error}") from None
    except RewardFailed as error:
        raise JobError(f"reward.function: {error.function} failed on a first trajectory: {error.reason}") from None
    finally:
        bench.shutdown()


def _first_turn(bench: Workbench, framing: Framing) -> int:
    task = evaluation_task(0)
    recorder = TrajectoryRecorder("check", 0, task, temperature=1.0)
    observation = bench.reset("check", task)
    opening = framing.opening(bench.system_prompt, observation.text)
    recorder.start(opening, observation.text)
    allowed = framing.allowed(observation.actions) if observation.actions else None
    token = allowed[0] if allowed is not None else min(framing.tokenizer.eos_ids, default=0)
    action = observation.actions[0] if observation.actions else ""
    recorder.sampled(np.array([token], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), allowed, action)
    standing, text = None, ""
    try:
        text = bench.step("check", action).observation.text
        standing = bench.standing("check")
    except EnvironmentFailed:
        if observation.actions:  # one of its own; where anything may be said it may refuse to hear nothing
            raise
    recorder.observed(np.empty(0, np.int32), text)
    env_return, success = (standing.env_return, standing.success) if standing is not None else (0.0, False)
    bench.score(recorder.finish(env_return=env_return, reward=0.0, success=success))
    return len(opening)


def _within(timeout_s: float, what: str, work: Callable[[], T]) -> T:
    """Run what may hang, in a thread that does not keep this process from ending."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # whoever waits gets it
            result.set_exception(error)

    threading.Thread(target=run, name="check", daemon=True).start()
    try:
        return result.result(timeout_s)
    except TimeoutError:
        if result.done():  # one of the work's own
            raise
        raise JobError(f"{what} did not end within {timeout_s:g} s (environment.step_timeout_s)") from None
