"""The mapping of tasks to hardware classes that a job asks for.

Invariant: a run never fails for want of an adviser, nor does its loop wait for one: where none can be had, the learned
mapping decides, and that is said once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from actors.core import Node
from actors.env.framing import Framing, framing_for
from actors.env.tokenizers import TokenizerError, load_tokenizer
from actors.policy import Policy
from coordinator.engines import Engines
from coordinator.job import Job
from coordinator.resources.advisor import EngineAdvisor
from coordinator.resources.resolve import number
from hwprobe.advice import Advisor
from hwprobe.mapping import Declared, Learned, TaskMapping


async def mapping_of(
    job: Job,
    node: Node,
    engines: Engines,
    *,
    warn: Callable[[str], None],
) -> TaskMapping:
    """``warn`` tells people where it is not as the job says."""
    if job.rollout.mapping == "declared":
        return Declared()
    if job.rollout.mapping == "learned":
        return Learned()
    try:
        framing = await asyncio.to_thread(_framing, job.policy)  # seconds of reading, for a large vocabulary
    except (TokenizerError, OSError) as error:
        warn(f"rollout.mapping: no engine can be asked for advice, the mapping is learned instead: {error}")
        return Learned()
    advisor = EngineAdvisor(engines, framing, number(job.rollout.max_model_len))
    await node.spawn(lambda: advisor, "advisor", restarts=0)
    return Advisor(advisor.ask)


def _framing(policy: Policy) -> Framing:
    return framing_for(load_tokenizer(policy))
