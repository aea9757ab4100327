"""The standby coordinator beside a spare: a process of its own, which outlives the spare's if need be.

    start --> stands by, or leads --DONE, INTERRUPTED--> nothing more to do: the run is over
                 ^          |
                 +--AGAIN_S-+-- RESTARTS times within STEADY_S of each other --> given up, with a reason

Invariant: at most one runs, and none is left once ``stop`` has returned. One that ends by itself is started again (a
leader that was deposed stands by again), or whoever asked for it is told why there is none any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from coordinator.launching.exits import DONE, INTERRUPTED

log = logging.getLogger(__name__)

RESTARTS = 3
STEADY_S = 600.0
"""One that has lasted so long is not counted among those that end as soon as they begin."""

AGAIN_S = 1.0
OVER_S = 30.0
"""How long one may take to notice that its run is over."""

END_S = 330.0
"""How long one may take to end: it may lead, and finish a step and save a checkpoint first."""


class Standby:
    """See the module docstring. ``gave_up`` is told why it is not started again."""

    def __init__(self, host: str, key_file: Path | None, gave_up: Callable[[str], None]) -> None:
        key = [] if key_file is None else ["--key-file", str(key_file)]
        self._words = [sys.executable, "-m", "coordinator.commands.start", "coordinator", "--host", host, *key]
        self._gave_up = gave_up
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
        loop, left = asyncio.get_running_loop(), RESTARTS
        log_path = run_directory / "logs" / "standby.out"
        while True:
            began = loop.time()
            try:
                status = await self._ended_with(run_directory, log_path)
            except OSError as error:
                self._gave_up(f"it cannot be started: {error}")
                return
            if status in (DONE, INTERRUPTED):
                return
            how = f"status {status}" if status >= 0 else f"signal {-status}"
            log.warning("the standby coordinator ended with %s; see %s", how, log_path)
            left = RESTARTS if loop.time() - began >= STEADY_S else left
            if left == 0:
                self._gave_up(f"it ended {1 + RESTARTS} times in a row, the last time with {how}; see {log_path}")
                return
            left -= 1
            await asyncio.sleep(AGAIN_S)

    async def _ended_with(self, run_directory: Path, log_path: Path) -> int:
        """The status of one process from its start to its end. Raises ``OSError``."""
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
        return await self._process.wait()

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
