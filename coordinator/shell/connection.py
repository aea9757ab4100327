"""How the shell finds a run and asks it.

Invariant: no question hangs. Each ends by its deadline, in an answer or in one line that names the run, where it was
asked and for how long.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from actors.core import Node, Ref
from actors.core.typed import Message
from bus.message import BusError, DeadlineExceeded, NodeAddress, NoSuchActor, RemoteError
from bus.security import ClusterKey, is_loopback
from coordinator.desk.messages import DESK
from coordinator.launch import ADDRESS_FILE, CONTROL
from coordinator.observe.rundir import Owner

T = TypeVar("T")
R = TypeVar("R")

ANSWER_S = 15.0
RETRIES = 2


class ShellError(ValueError):
    """A command that cannot be carried out, or a run that does not answer; one line."""


class Target(msgspec.Struct, frozen=True):
    """Where a run's coordinator listens."""

    name: str  # for people: the run directory, or the address
    address: str
    directory: Path | None = None


def find(run: Path, connect: str | None) -> Target:
    """By its address, or in its run directory. Raises ``ShellError``."""
    if connect is not None:
        if not connect.startswith("tcp://") or not connect.rpartition(":")[2].isdigit():
            raise ShellError(f"--connect: expected an address such as tcp://127.0.0.1:4711, found {connect!r}")
        return Target(connect, connect)
    directory = run.resolve()
    if not directory.is_dir():
        raise ShellError(f"{run}: no such run directory; name one with --run, or the coordinator with --connect")
    try:
        address = (directory / ADDRESS_FILE).read_text().strip()
    except OSError:
        raise ShellError(f"{run}: no run is going on there (no {ADDRESS_FILE}); name another with --run") from None
    if (owner := gone_owner(directory)) is not None:
        raise ShellError(
            f"{run}: its process {owner.pid} is gone without a word (killed?); go on with train --resume {run}"
        )
    return Target(directory.name, address, directory)


def gone_owner(directory: Path) -> Owner | None:
    """Who owned a run directory of this host, and has ended."""
    try:
        owner = msgspec.json.decode((directory / "owner.lock").read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError):
        return None
    here = owner.host == socket.gethostname()
    return owner if here and not Path(f"/proc/{owner.pid}").exists() else None


def own_host(address: str) -> str:
    """The address of this host at which a coordinator's answers arrive: the one that leads there. Raises
    ``ShellError``."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    if is_loopback(host):
        return "127.0.0.1"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting one sends nothing
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ShellError(f"{address}: no way leads there from this host: {error.strerror or error}") from None


def open_node(address: str, key: ClusterKey | None) -> Node:
    """The shell's own node, under a name that its key is good for. Raises ``SecurityError``, ``ShellError``."""
    name = f"admin-{socket.gethostname()}-{os.getpid()}"
    if key is not None and key.content.node:
        name = f"{key.content.node}.{name}"
    return Node(name, host=own_host(address), key=key)


class Connection:
    """One run's coordinator and its desk, as the shell asks them."""

    def __init__(self, node: Node, target: Target, *, timeout_s: float = ANSWER_S) -> None:
        self.node = node
        self.target = target
        self._timeout_s = timeout_s

    async def ask(self, message: Message[R], *, timeout_s: float | None = None) -> R:
        """Raises ``ShellError``."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s

        async def asked() -> R:
            return await self.node.ask(self._actor(DESK), message, timeout_s=limit_s, retries=RETRIES)

        return await self._answer(asked, limit_s)

    async def ask_coordinator(self, message: msgspec.Struct, reply: type[T]) -> T:
        """Raises ``ShellError``."""

        async def asked() -> T:
            to = self._actor("coordinator")
            return await self.node.ask(to, message, reply, timeout_s=self._timeout_s, retries=RETRIES)

        return await self._answer(asked, self._timeout_s)

    async def stream(self, message: Message[R], *, item_s: float) -> AsyncGenerator[R, None]:
        """Raises ``ShellError``."""
        try:
            async with aclosing(self.node.stream(self._actor(DESK), message, timeout_s=item_s)) as items:
                async for item in items:
                    yield item
        except BusError as error:
            raise self._explained(error, item_s) from None

    def _actor(self, name: str) -> Ref[Any]:
        return Ref(NodeAddress(CONTROL, self.target.address, "", 0), name)

    async def _answer(self, asked: Callable[[], Awaitable[T]], limit_s: float) -> T:
        """What is answered, if need be by who leads the run now."""
        try:
            return await asked()
        except BusError as error:
            if not self._moved(error):
                raise self._explained(error, limit_s) from None
        try:
            return await asked()
        except BusError as error:
            raise self._explained(error, limit_s) from None

    def _moved(self, error: BusError) -> bool:
        """Whether another process leads the run by now, which is asked from here on. Raises ``ShellError`` where the
        run is over."""
        if isinstance(error, RemoteError) or self.target.directory is None:
            return False
        before, self.target = self.target, find(self.target.directory, None)
        return self.target.address != before.address

    def _explained(self, error: BusError, limit_s: float) -> ShellError:
        target = self.target
        if isinstance(error, RemoteError):
            return ShellError(error.remote_message)
        if isinstance(error, DeadlineExceeded):
            where = "" if target.name == target.address else f" at {target.address}"
            return ShellError(
                f"{target.name}: the coordinator{where} has not answered within {limit_s:g} s: it has ended, is busy, "
                "or wants another key file (--key-file); --timeout waits longer"
            )
        if isinstance(error, NoSuchActor):
            return ShellError(f"{target.name}: {error}; the run is just starting or ending, or of another version")
        return ShellError(f"{target.name}: {error}")
