"""What every child process does around its work: die with its parent, log, join, report, and stop when told.

    python -m MODULE '<ChildSpec as JSON>'

Invariant: the process ends when asked (SIGTERM), when its parent is gone, or when its work fails, at any time after its
start, even if a thread of its work hangs, and says which on its last log line. Ctrl-C in a terminal is the parent's
business, not its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from actors.core.logs import configure_logging
from actors.core.node import Node
from actors.core.ref import Ref
from bus.message import NodeAddress
from bus.security import ClusterKey, read_key

S = TypeVar("S")
Finish = Callable[[], Awaitable[None]]
log = logging.getLogger(__name__)

EXIT_WORK_FAILED = 3

END_S = 5.0
"""From the reason to end to the end itself, at most."""


class ChildSpec(msgspec.Struct, frozen=True):
    """Everything that a child is told on its command line."""

    name: str  # of its node
    job: str
    parent: NodeAddress
    log_directory: str
    settings: dict[str, Any]  # for the work itself; the module knows the type
    telemetry: Ref | None = None  # where spans go
    host: str = "127.0.0.1"
    key_file: str | None = None
    parent_silence_s: float = 60.0  # without a sign of life from the parent; a parent that has died is noticed at once

    @property
    def key(self) -> ClusterKey | None:
        return read_key(Path(self.key_file)) if self.key_file is not None else None


class ChildContext:
    """What the work in a child gets to see."""

    def __init__(self, spec: ChildSpec, node: Node) -> None:
        self.spec = spec
        self.node = node
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._failed = False

    def parent(self, actor: str) -> Ref:
        """An actor of the parent."""
        return Ref(self.spec.parent, actor)

    def fail(self, error: BaseException) -> None:
        """End the process because its work cannot go on."""
        self._failed = True
        log.error("cannot go on", exc_info=error)
        self.end(f"{type(error).__name__}: {' '.join(str(error).split())}")  # one line: its last one

    def end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)

    async def until_end(self) -> None:
        """Wait for a reason to end."""
        await asyncio.shield(self._ended)

    def close(self) -> int:
        """Say why this process ends; returns its exit status. From now on it has ``END_S`` to go."""
        reason = self._ended.result()
        log.error("ending: %s", reason) if self._failed else log.info("ending: %s", reason)
        status = EXIT_WORK_FAILED if self._failed else 0
        limit = threading.Timer(END_S, os._exit, [status])  # a hung thread would keep the interpreter for ever
        limit.daemon = True
        limit.start()
        return status


def read_settings(spec: ChildSpec, type_: type[S]) -> S:
    """The work's own settings, typed."""
    return msgspec.convert(spec.settings, type_)


def run_child(work: Callable[[ChildContext], Awaitable[Finish]]) -> NoReturn:
    """``work`` sets up actors and returns what to await at the end. Ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = msgspec.json.decode(sys.argv[1], type=ChildSpec)
    configure_logging(spec.name, Path(spec.log_directory), job=spec.job)
    status = asyncio.run(_run(spec, work))
    # Everything is closed by now. Taking the interpreter down in good order takes seconds once torch is loaded, and for
    # ever where a thread of the work hangs.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


async def _run(spec: ChildSpec, work: Callable[[ChildContext], Awaitable[Finish]]) -> int:
    # A child's next incarnation starts on this machine: unlike the time of day, its monotonic clock never goes back.
    # Other threads of it compute, beside which an event loop that does not sleep is in the way.
    async with Node(spec.name, host=spec.host, key=spec.key, epoch=time.monotonic_ns(), eager=False) as node:
        context = ChildContext(spec, node)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, context.end, "asked to stop")
        node.watch(
            spec.parent, silence_s=spec.parent_silence_s, on_lost=lambda why: context.end(f"the parent is gone: {why}")
        )
        working = asyncio.ensure_future(_work(context, work))
        await context.until_end()
        if not working.done():  # still starting
            working.cancel()
        status = context.close()
        for finish in await asyncio.gather(working, return_exceptions=True):
            if callable(finish):
                await finish()
        return status


async def _work(context: ChildContext, work: Callable[[ChildContext], Awaitable[Finish]]) -> Finish | None:
    try:
        return await work(context)
    except Exception as error:  # whatever start-up raises is this process's last word
        context.fail(error)
        return None
