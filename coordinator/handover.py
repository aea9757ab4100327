"""Lets a node of a run go so that another takes its roles, while the run goes on: for new software, or another host.

    asked -> the step under way ends -> (trainer: a checkpoint) -> the node is told to end, and has
          -> another node joins with its roles and announces them -> everybody is told -> the next step

Invariant: no trajectory is lost or trained on twice. What runs goes on: whoever has something to ask of a role that is
vacant waits for its successor, and an env host asks that one anew. The trajectory store is the same file; the trainer's
successor goes on from a checkpoint of the very version that the run is at.

An env host is let go once nothing is left there (``drain``): the others play on meanwhile. One of several proxies is
let go at once: what it was asked is asked of the others. A leader steps down instead (``coordinator.leadership``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from actors.core import Node, Ref
from bus.message import BusError
from coordinator.checkpoints import CheckpointUnusable
from coordinator.coordinator import Coordinator
from coordinator.messages import Changed, Join, Role
from coordinator.pipeline import PipelineStuck

log = logging.getLogger(__name__)

GONE_S = 60.0
"""How long a node that was told to end may take; it stops its child processes first."""
LOOK_EVERY_S = 0.05


class Steps(Protocol):
    """The training loop; see ``coordinator.pipeline.Pipeline``."""

    def between_steps(self) -> AbstractAsyncContextManager[None]: ...

    async def checkpoint(self) -> Path: ...

    async def succeeded(self, role: Role, ref: Ref) -> None: ...


class Handover:
    """See the module docstring. ``pipeline`` is there once the run has begun; ``failed`` ends the run."""

    def __init__(
        self,
        node: Node,
        coordinator: Coordinator,
        *,
        start_timeout_s: float,
        failed: Callable[[BaseException], None],
        say: Callable[[str], None],
    ) -> None:
        self.pipeline: Steps | None = None
        self._node = node
        self._roster = coordinator.roster
        self._dispatcher = coordinator.dispatcher
        self._start_timeout_s = start_timeout_s
        self._failed = failed
        self._say = say
        self._under_way = ""

    @property
    def under_way(self) -> str:
        """Which node is being replaced, "" for none."""
        return self._under_way

    async def let_go(self, name: str) -> Changed:
        """Returns before it is gone, but for an env host. Raises ``ValueError`` where it cannot be."""
        join = self._known(name)
        if self._under_way:
            raise ValueError(f"{self._under_way} is being replaced: one node after the other")
        self._check_empty(join)
        if self._roster.one_of_several(join):
            await self._end(join)
            return Changed(
                f"{name} is gone; the run goes on without it until another {_named(join)} joins in its place"
            )
        if self.pipeline is None:
            raise ValueError("the run has not begun yet: end it, and start it with the new software")
        self._under_way = name
        self._node.background(self._replace(join, self.pipeline))
        return Changed(f"{name} ends after the step under way; the run then waits for another {_named(join)}")

    def _known(self, name: str) -> Join:
        joins = {join.node.name: join for join in self._roster.joins}
        if name not in joins:
            raise ValueError(f"no node {name!r} has joined; there are {', '.join(joins)}")
        if "coordinator" in joins[name].roles:
            raise ValueError(f"{name} leads the run: 'step-down' lets a standby lead it on")
        return joins[name]

    def _check_empty(self, join: Join) -> None:
        if "env" in join.roles and (there := self._dispatcher.hosts.drain(join.node.name, draining=True)):
            raise ValueError(
                f"{there} trajectories are still on {join.node.name}, which is given no new ones now: once they have "
                "ended ('queues' shows it), again"
            )

    async def _replace(self, join: Join, pipeline: Steps) -> None:
        try:
            async with pipeline.between_steps():
                if "trainer" in join.roles:
                    self._roster.welcome_at(await pipeline.checkpoint(), self._dispatcher.scheduler.version)
                await self._end(join)
                self._say(f"{join.node.name} is gone; waiting for another {_named(join)}")
                for role in join.roles:
                    if role != "env":
                        await pipeline.succeeded(role, await self._roster.role(role, self._start_timeout_s))
            self._say(f"going on with another {_named(join)}")
        except (BusError, TimeoutError, OSError, CheckpointUnusable, PipelineStuck) as error:
            self._failed(error)
        finally:
            self._under_way = ""

    async def _end(self, join: Join) -> None:
        """Raises ``BusError`` where the node does not listen, ``TimeoutError`` where it does not end."""
        await self._roster.dismiss(join)
        try:
            async with asyncio.timeout(GONE_S):
                while not self._node.is_gone(join.node):  # noqa: ASYNC110  (as the bus learns of it)
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            raise TimeoutError(f"{join.node.name} was told to end and has not within {GONE_S:g} s") from None


def _named(join: Join) -> str:
    return f"node for {', '.join(join.roles)}"
