"""The standby coordinator beside a spare: a process of its own, which outlives the spare's if need be.

Invariant: at most one runs, and none is left once ``stop`` has returned. One that ends by itself has nothing more to
do (the run is over), or is started again, ``RESTARTS`` times: a leader that was deposed stands by again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from pathlib import Path

from coordinator.launching.exits import DONE, INTERRUPTED

log = logging.getLogger(__name__)

RESTARTS = 3
AGAIN_S = 1.0
OVER_S = 30.0
"""How long one may take to notice that its run is over."""

END_S = 330.0
"""How long one may take to end: it may lead, and finish a step and save a checkpoint first."""


class Standby:
    """See the module docstring."""

    def __init__(self, host: str, key_file: Path | None) -> None:
        key = [] if key_file is None else ["--key-file", str(key_file)]
        self._words = [sys.executable, "-m", "coordinator.commands.start", "coordinator", "--host", host, *key]
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Of the one that runs; 0 for none."""
        return 0 if self._process is None or self._process.returncode is not None else self._process.pid

    def start(self, run_directory: Path) -> None:
        """Unless there is one."""
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.create_task(self._keep(run_directory))

    async def _keep(self, run_directory: Path) -> None:
        log_path = run_directory / "logs" / "standby.out"
        for _ in range(1 + RESTARTS):
            with log_path.open("ab") as out:
                self._process = await asyncio.create_subprocess_exec(
                    *self._words,
                    "--standby-of",
                    str(run_directory),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            status = await self._process.wait()
            if status in (DONE, INTERRUPTED):
                return
            log.warning("the standby coordinator ended with status %d; see %s", status, log_path)
            await asyncio.sleep(AGAIN_S)

    async def stop(self, *, grace_s: float = 0.0) -> None:
        """Let it end; it is asked to once, if it has not by itself after ``grace_s``: a second signal would cut short
        what it does at its end. Idempotent."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(grace_s))
        await asyncio.shield(self._stopping)

    async def _stop(self, grace_s: float) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        process = self._process
        if process is None or await _ended(process, grace_s):
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        if not await _ended(process, END_S):
            log.error("the standby coordinator (pid %d) does not end: killed", process.pid)
            process.kill()
            await process.wait()


async def _ended(process: asyncio.subprocess.Process, within_s: float) -> bool:
    try:
        await asyncio.wait_for(process.wait(), within_s)
    except TimeoutError:
        return False
    return True
