"""What can be checked before anything is started: user code imports, actions are single tokens, directories exist.

Invariant: a mistake in a job that can be seen from this process is one line and exit status 2, not a failed child.
"""

from __future__ import annotations

from pathlib import Path

from actors.env.catalogue import EnvironmentUnavailable, make_environment
from actors.env.failures import UserError, one_line
from actors.env.framing import ActionNotOneToken, framing_for
from actors.env.protocol import evaluation_task, system_prompt
from actors.env.tokenizers import TokenizerError, load_tokenizer
from actors.reward.functions import RewardUnavailable, load_reward
from coordinator.job import Job, JobError
from coordinator.resources.resolve import number, policy_facts


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
    try:
        load_reward(job.reward, job_directory)
        environment = make_environment(job.environment, job_directory)
    except (RewardUnavailable, EnvironmentUnavailable) as error:
        raise JobError(str(error)) from None
    try:
        observation = environment.reset(evaluation_task(0))
        opening = framing.opening(system_prompt(environment), observation.text)
        if observation.actions:
            framing.allowed(observation.actions)
    except ActionNotOneToken as error:
        raise JobError(f"environment.name: {job.environment.name}: {error}") from None
    except UserError as error:
        raise JobError(
            f"environment.name: {job.environment.name} failed at its first reset: {one_line(error)}"
        ) from None
    limit = number(job.rollout.max_model_len)
    if len(opening) + job.rollout.max_tokens_per_turn > limit:
        raise JobError(
            f"rollout.max_model_len: the first prompt alone has {len(opening)} tokens; with "
            f"{job.rollout.max_tokens_per_turn} more the limit of {limit} is exceeded"
        )
