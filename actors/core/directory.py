"""Where names are looked up: which actor, on which incarnation of which node, a name stands for now.

Invariant: a name stands for at most one ref; a withdrawal takes away no later announcement. A node is announced under
``@`` and its name, as the ref of the actor that speaks for it: ports are whatever was free.
"""

from __future__ import annotations

from typing import Protocol

from actors.core.ref import Ref
from bus.message import BusError


class DirectoryError(BusError):
    """The directory does not answer, or cannot do as asked."""


class Directory(Protocol):
    """Every method may raise ``DirectoryError``, within a time of the directory's own."""

    async def announce(self, name: str, ref: Ref) -> None:
        """From now on the name stands for this ref, whatever it stood for."""

    async def withdraw(self, name: str, ref: Ref) -> None:
        """The name stands for nothing, if it still stands for this ref."""

    async def find(self, name: str) -> Ref | None:
        """What the name stands for."""


class LocalDirectory:
    """For nodes of one process."""

    def __init__(self) -> None:
        self._refs: dict[str, Ref] = {}

    async def announce(self, name: str, ref: Ref) -> None:
        self._refs[name] = ref

    async def withdraw(self, name: str, ref: Ref) -> None:
        if self._refs.get(name) == ref:
            del self._refs[name]

    async def find(self, name: str) -> Ref | None:
        return self._refs.get(name)
