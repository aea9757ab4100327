"""A job's side of dumps: whose trajectories they are, and whether one fits a job.

Invariant: a dump that does not fit is refused with one line before anything is started.
"""

from __future__ import annotations

from pathlib import Path

from actors.trainer.dump import FORMAT, Dump, DumpError, Manifest, check_fit, facts_of, read_dump
from coordinator.job import Job, JobError
from coordinator.resources.resolve import policy_facts


def manifest_of(job: Job) -> Manifest:
    """Of trajectories that this job's policy samples. Raises ``JobError``."""
    try:
        facts = facts_of(job.policy, policy_facts(job).vocab_size)
    except DumpError as error:
        raise JobError(f"policy.tokenizer: {error}") from None
    return Manifest(FORMAT, job.name, job.environment.name, facts)


def fitting_dump(path: Path, job: Job) -> Dump:
    """Read a dump (or what a run has recorded) for use with the job's policy. Raises ``JobError``."""
    try:
        dump = read_dump(path)
        check_fit(dump, manifest_of(job).facts)
    except DumpError as error:
        raise JobError(str(error)) from None
    longest = max(len(segment.tokens) for trajectory in dump.trajectories for segment in trajectory.segments)
    limit = policy_facts(job).max_positions
    if longest > limit:
        raise JobError(f"{dump.path}: its longest segment has {longest} tokens, the policy {limit} positions")
    return dump
