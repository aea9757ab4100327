"""What can be checked before anything is started: user code imports, actions are single tokens, directories exist.

Invariant: a mistake in a job that can be seen from this process is one line and exit status 2, not a failed child; and
user code that does not return holds this up no longer than the job allows for a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from actors.env.catalogue import EnvironmentUnavailable
from actors.env.framing import ActionNotOneToken, framing_for
from actors.env.protocol import Observation, evaluation_task
from actors.env.tokenizers import TokenizerError, load_tokenizer
from actors.env.workbench import EnvironmentFailed, Workbench
from actors.reward.functions import RewardUnavailable
from coordinator.job import Job, JobError
from coordinator.resources.resolve import number, policy_facts

T = TypeVar("T")


def check_job(job: Job, job_directory: Path) -> None:
    """Raises ``JobError`` naming the setting."""
    facts = policy_facts(job)
    try:
        tokenizer = load_tokenizer(job.policy)
        framing = framing_for(tokenizer)
    except TokenizerError as error:
        raise JobError(f"policy.tokenizer: {error}") from None
    if tokenizer.vocab_size > facts.vocab_size:
        raise JobError(f"policy: the tokenizer has {tokenizer.vocab_size} ids, the model {facts.vocab_size} embeddings")
    prompt, observation = _within(
        job.environment.step_timeout_s,
        f"environment.name: {job.environment.name}: importing it, making one and its first reset",
        lambda: _first_observation(job, job_directory),
    )
    try:
        opening = framing.opening(prompt, observation.text)
        if observation.actions:
            framing.allowed(observation.actions)
    except ActionNotOneToken as error:
        raise JobError(f"environment.name: {job.environment.name}: {error}") from None
    limit = number(job.rollout.max_model_len)
    if len(opening) + job.rollout.max_tokens_per_turn > limit:
        raise JobError(
            f"rollout.max_model_len: the first prompt alone has {len(opening)} tokens; with "
            f"{job.rollout.max_tokens_per_turn} more the limit of {limit} is exceeded"
        )


def _first_observation(job: Job, job_directory: Path) -> tuple[str, Observation]:
    """The environment's system prompt, and what its first held-out task shows."""
    try:
        bench = Workbench(job.environment, job_directory, job.reward)
    except (RewardUnavailable, EnvironmentUnavailable) as error:
        raise JobError(str(error)) from None
    try:
        return bench.system_prompt, bench.reset("check", evaluation_task(0))
    except EnvironmentFailed as error:
        raise JobError(
            f"environment.name: {job.environment.name} failed at its first {error.during}: {error.reason}"
        ) from None
    finally:
        bench.shutdown()


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
