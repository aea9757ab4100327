"""A run's work, to its end: until it is done, interrupted or failed; then what was learned is saved.

Invariant: where there is something to save, the step under way is waited for, so long as how the run ends allows it,
and a checkpoint is written of the moment after it; where none is written, the outcome says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from coordinator.fate import Fate
from coordinator.interruption import Interrupted
from coordinator.losses import RoleLost
from coordinator.observe.progress import Progress
from coordinator.pipeline import Pipeline

STEP_GRACE_S = 3.0
"""How long a run that ends waits for the step under way: its end is the next moment that can be saved."""

WHOLE_STEP_GRACE_S = 300.0
"""How long it waits once it has said so, if it was interrupted by a person who may end the wait."""


class Finish:
    """See the module docstring. ``saves``: whether what is done is worth a checkpoint; ``resumed``: the one that this
    sitting went on from."""

    def __init__(
        self, pipeline: Pipeline, fate: Fate, progress: Progress, *, saves: bool, resumed: Path | None
    ) -> None:
        self._pipeline = pipeline
        self._fate = fate
        self._progress = progress
        self._saves = saves
        self._resumed = resumed

    async def drive(self, program: Coroutine[Any, Any, str]) -> tuple[int, str]:
        """Exit status and outcome. Raises what the run fails for."""
        training = asyncio.create_task(program)
        status = 0
        try:
            outcome = await self._fate.race(training)
        except Interrupted as interruption:
            status, outcome = 130, str(interruption)
            between_steps = await self.out_of_step()
        except BaseException as error:
            # Neither while the run is to go on elsewhere, nor when it is cancelled, is there time.
            failed = isinstance(error, Exception) and not isinstance(error, RoleLost)
            between_steps = await (self.out_of_step() if failed else self._pipeline.leave_step(STEP_GRACE_S))
            await self._end(training)
            await self._save_after_failure(between_steps)
            raise
        else:
            between_steps = await self._pipeline.leave_step(STEP_GRACE_S)
        await self._end(training)
        if not self._saves:
            return status, outcome
        return status, f"{outcome}; {await self._saved(between_steps)}"

    async def out_of_step(self) -> bool:
        """A step of a large model may take minutes, and what the last ones learned is worth the wait, whatever else has
        failed; a second Ctrl-C ends it."""
        if await self._pipeline.leave_step(STEP_GRACE_S):
            return True
        if not (self._saves and self._pipeline.can_save and self._pipeline.in_step):
            return False
        self._progress.note("the training step under way is finished first (Ctrl-C again stops at once)")
        return await self._pipeline.leave_step(WHOLE_STEP_GRACE_S)

    async def _end(self, training: asyncio.Task[str]) -> None:
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        await self._pipeline.stop()

    async def _saved(self, between_steps: bool) -> str:
        if not self._pipeline.can_save:
            kept = "" if self._resumed is None else f"; {self._resumed.name} is as it was"
            return f"no checkpoint: the trainer was not up yet{kept}"
        if not between_steps:
            return f"no checkpoint: the step under way took more than {WHOLE_STEP_GRACE_S:g} s"
        return await self._save()

    async def _save(self) -> str:
        path = await self._pipeline.checkpoint()
        return f"checkpoint {path.name} written"

    async def _save_after_failure(self, between_steps: bool) -> None:
        """A logic error leaves a checkpoint too, where the trainer still lives."""
        if not (self._saves and self._pipeline.can_save and between_steps):
            return
        try:
            async with asyncio.timeout(STEP_GRACE_S * 10):
                self._progress.note(await self._save())
        except Exception as error:  # the first failure is what the user must see
            self._progress.warn(f"no checkpoint could be written: {error}")
