"""The processes of one run, or of one host of it, as one: started together, heard together, ended in order.

Invariant: when ``run`` returns no process that it started on this machine is left, and its status is what the run said:
the coordinator's where it is one of them, else the first that went wrong. A signal is passed on to the coordinator
alone, who ends the run with a checkpoint and dismisses the others; only a second one, or the end of ``DRAIN_S``, ends
them under it. Where it ends because another one leads, or is lost beside a spare, that is not the end: the others go on
until whoever leads next dismisses them; a signal then goes to the spares, one of which has the coordinator beside it,
or waits for that dismissal where there are none. Whoever is started here ends when its standard input does
(``--stop-on-eof``): also where a shell such as ssh is between, which passes no signals on, and where this process is
killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence

from coordinator.launching.exits import DEPOSED, DONE, FAILED, INTERRUPTED, NOT_TAKEN, STEPPED_DOWN, USAGE

DRAIN_S = 330.0
"""How long roles are kept for a run that is ending elsewhere: longer than a run may finish its step and save."""

DISMISSED_S = 30.0
"""How long a role may take to end once the coordinator has."""

CLOSED_S = 15.0
"""How long it may take once its standard input has ended; then it is killed."""

ORDERLY = (DONE, FAILED, USAGE, NOT_TAKEN, INTERRUPTED)
"""With which a coordinator ends that has ended its run; else it was killed, cut off, or succeeded."""

SUCCEEDED = (DEPOSED, STEPPED_DOWN)
"""With which it ends where another one leads its run on."""

READY = " is ready for run "
"""In what a role prints once it has been taken."""


class Part:
    """One process of a crew."""

    def __init__(self, name: str, words: Sequence[str], *, leads: bool = False, spare: bool = False) -> None:
        self.name = name
        self.words = words
        self.leads = leads
        self.spare = spare
        self.ready = False
        self.process: asyncio.subprocess.Process | None = None
        self.status: int | None = None


class Crew:
    """See the module docstring. ``say`` takes lines for people."""

    def __init__(
        self, parts: Iterable[Part], say: Callable[[str], None], environment: Mapping[str, str] = os.environ
    ) -> None:
        self._parts = list(parts)
        self._say = say
        self._environment = dict(environment)
        self._lead = next((part for part in self._parts if part.leads), None)
        self._signals = 0
        self._failed: int | None = None
        self._changed = asyncio.Event()

    async def run(self) -> int:
        """Start all, wait for the end of the run, and return its status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, signal.Signals(number).name)
        watching = [asyncio.create_task(self._see_through(part)) for part in self._parts]
        try:
            if self._lead is None:
                await asyncio.wait(watching)
            else:
                await self._until(lambda: self._lead is None or self._lead.status is not None)
                if self._led_on():
                    self._say("the coordinator is gone: the run goes on where there is a standby")
                    await asyncio.wait(watching)
                else:
                    await self._dismiss(watching)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            self._kill()
            await asyncio.gather(*watching)
        return self._status()

    def _led_on(self) -> bool:
        """Whether somebody else may lead now."""
        if self._lead is None or self._lead.status is None or self._lead.status in ORDERLY:
            return False
        return self._lead.status in SUCCEEDED or self._has_spares()

    def _has_spares(self) -> bool:
        return any(part.spare for part in self._parts)

    def _status(self) -> int:
        if self._failed is not None:  # the run could not begin: why says more than that it was then interrupted
            return self._failed
        if self._led_on() and len(self._parts) > 1:  # those who were dismissed have heard that the run has ended
            return DONE if any(part.status == DONE for part in self._parts) else FAILED
        if self._lead is not None and self._lead.status is not None:
            return self._lead.status
        return next((part.status for part in self._parts if part.status), DONE)

    async def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._changed.clear()
            await self._changed.wait()

    async def _dismiss(self, watching: Sequence[asyncio.Task[None]]) -> None:
        """The coordinator has ended: whoever it could tell ends by itself, the others are asked to."""
        for part in self._parts:
            if not part.ready:
                self._close(part)
        _, late = await asyncio.wait(watching, timeout=DISMISSED_S)
        if late:
            for part in self._parts:
                self._close(part)
            await asyncio.wait(late, timeout=CLOSED_S)

    # ---- signals -------------------------------------------------------------------------------------------------

    def _signalled(self, name: str) -> None:
        self._signals += 1
        loop = asyncio.get_running_loop()
        if self._signals > 1:
            self._say(f"{name} again: ending everything")
            self._insist()
        elif self._led_on() and self._has_spares():
            self._say(f"{name}: the coordinator beside a spare ends the run (again to insist)")
            for part in self._parts:
                if part.spare:
                    self._close(part)
        elif self._lead is not None and self._lead.status is None:
            self._say(f"{name}: the coordinator ends the run (again to insist)")
            self._close(self._lead)
        else:
            self._say(f"{name}: kept until the coordinator ends the run, {DRAIN_S:g} s at most (again to insist)")
            loop.call_later(DRAIN_S, self._insist)

    def _insist(self) -> None:
        for part in self._parts:
            self._close(part)
            if part.process is not None and part.status is None:
                with contextlib.suppress(ProcessLookupError):
                    part.process.terminate()
        asyncio.get_running_loop().call_later(CLOSED_S, self._kill)

    def _close(self, part: Part) -> None:
        if part.process is not None and part.process.stdin is not None:
            part.process.stdin.close()

    def _kill(self) -> None:
        for part in self._parts:
            if part.process is not None and part.status is None:
                self._say(f"{part.name}: did not end in time, killed")
                with contextlib.suppress(ProcessLookupError):
                    part.process.kill()

    # ---- one process ---------------------------------------------------------------------------------------------

    async def _see_through(self, part: Part) -> None:
        """Start a process, pass on what it says, and note how it ended."""
        try:
            part.process = await asyncio.create_subprocess_exec(
                *part.words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # a terminal's Ctrl-C reaches this process alone
            )
        except OSError as error:
            self._say(f"{part.name}: {part.words[0]} cannot be started: {error.strerror}")
            self._ended(part, FAILED)
            return
        if self._signals:  # meanwhile
            self._close(part)
        if part.process.stdout is not None:
            async for line in part.process.stdout:
                self._heard(part, line.decode(errors="replace").rstrip())
        status = await part.process.wait()
        self._ended(part, status if status >= 0 else 128 - status)

    def _heard(self, part: Part, line: str) -> None:
        part.ready = part.ready or READY in line
        self._say(line if part.leads else f"{part.name} | {line}")

    def _ended(self, part: Part, status: int) -> None:
        part.status = status
        if status and not part.leads:
            self._say(f"{part.name}: exit status {status}")
        if status and not part.ready and not part.leads and not self._signals and self._failed is None:
            self._lose(part, status)
        self._changed.set()

    def _lose(self, part: Part, status: int) -> None:
        """A role that nobody has told the coordinator of: it would wait for it."""
        if self._lead is not None and self._lead.status is None:
            self._say(f"{part.name} was never ready: the run cannot begin")
            self._failed = status
            self._close(self._lead)
