"""What may end a run before its work is done: the failure of a part, or a person's word.

Invariant: the first failure is the run's, whatever fails because of it later; and whoever waits for a part of the run
through ``race`` learns of either at once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, TypeVar

from bus.message import BusError, DeadlineExceeded
from coordinator.interruption import Interrupted, Interruption
from coordinator.leadership import Authority, Deposed
from coordinator.losses import RoleLost

T = TypeVar("T")
log = logging.getLogger(__name__)

CERTAIN_GRACE_S = 5.0
"""How long a run that fails waits to know whether it is still led from here."""

CAUSE_GRACE_S = 2.0
"""How long a run whose messages fail waits for the word of who has died."""


class Fate:
    """Of one sitting; create inside a running event loop."""

    def __init__(self, interruption: Interruption, authority: Authority, *, verdict_s: float = CAUSE_GRACE_S) -> None:
        """``verdict_s``: after how long a node that does not answer is known to be lost, at the latest."""
        self._failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._interruption = interruption
        self._authority = authority
        self._verdict_s = verdict_s

    def fail(self, error: BaseException) -> None:
        """A part of the run has failed."""
        log.info("fatal: %s", error)
        if not self._failure.done():
            self._failure.set_result(error)

    @property
    def lost(self) -> RoleLost | None:
        """The role that the run failed for."""
        failure = self._failure.result() if self._failure.done() else None
        return failure if isinstance(failure, RoleLost) else None

    @property
    def trainer_died(self) -> bool:
        """Whether that is what the run failed for."""
        return self.lost is not None and self.lost.role == "trainer"

    async def race(self, task: asyncio.Task[T]) -> T:
        """The result of a task, unless a part of the run fails or Ctrl-C arrives first; the task is then left as it
        is. Raises the failure, or ``Interrupted``."""
        waiting: set[asyncio.Future[Any]] = {task, self._failure, self._interruption.asked}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if self._failure.done():
            raise self._failure.result()
        raise Interrupted("interrupted")

    async def outcome(self, error: Exception) -> str:
        """That of a run which ends with this error, or with what led to it."""
        await self._while_leading()
        return failed(await self._cause(error))

    async def _while_leading(self) -> None:
        """What fails once another process leads is none of this one's business, which is about to end
        (``commands.lead``); where that is uncertain, it is waited for, for a while."""
        try:
            async with asyncio.timeout(CERTAIN_GRACE_S):
                await self._authority.certain()
        except TimeoutError:
            log.warning("it is uncertain whether this process still leads")
        except Deposed:
            await asyncio.sleep(CERTAIN_GRACE_S)

    async def _cause(self, error: Exception) -> Exception:
        """Who died, where that is why messages failed."""
        if isinstance(error, BusError) and not self._failure.done():
            grace_s = self._verdict_s if isinstance(error, DeadlineExceeded) else CAUSE_GRACE_S
            await asyncio.wait({self._failure}, timeout=grace_s)
        failure = self._failure.result() if self._failure.done() else None
        return failure if isinstance(failure, RoleLost) else error


def failed(error: Exception) -> str:
    """The outcome of a run that ends with this error; the traceback goes to the log file."""
    log.info("the run failed", exc_info=error)
    reason = " ".join(str(error).split()) or repr(error)
    log.error("%s", reason)
    return f"failed: {reason}"
