"""Which proxies a run has, as everybody is told.

    proxy --Announce(places)--> roster --Moved(proxies)--> every node --> its env host, its weight-sync
    proxy is lost, let go ------^

Invariant: of two sets the one with the greater order (the leader's epoch, then a number) is the newer one, and whoever
has heard of it does not go back to the other.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.core import Ref
from actors.proxy.messages import ProxySet, ServingProxy

Listener = Callable[[ProxySet], object]


class ProxyNews:
    """The newest set that a node has heard of, and whom it tells."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self.found = ProxySet()

    def on_change(self, listener: Listener) -> None:
        """Told at once where there are any, and whenever there are others."""
        self._listeners.append(listener)
        if self.found.members:
            listener(self.found)

    def hear(self, found: ProxySet) -> None:
        """Of a set, be it of an older time than the one that is known. All are told; raises what any of them raised."""
        if found.order > self.found.order or not self.found.members:
            self.found = found
            errors = [error for listener in self._listeners if (error := _told(listener, found)) is not None]
            if errors:
                raise ExceptionGroup(f"of the proxies {found.order} everybody was told, and some failed on it", errors)

    def hear_of_one(self, ref: Ref) -> None:
        """From software that knows of one proxy only, which was asked just now."""
        epoch, number = self.found.order
        self.hear(ProxySet([ServingProxy(ref)], (epoch, number + 1)))


class ProxyBook(ProxyNews):
    """The leader's: who has announced itself, and is not gone."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.found = ProxySet([], (epoch, 0))
        self._begun = False  # whether any has served

    @property
    def refs(self) -> list[Ref]:
        return [member.ref for member in self.found.members]

    def has(self, ref: Ref) -> bool:
        return ref in self.refs

    def serve_without(self, node: str) -> bool:
        """Whether any other than this node's has engines that serve, or will as soon as any does."""
        others = [member for member in self.found.members if member.ref.node.name != node]
        return any(member.serves for member in others) or (bool(others) and not self._begun)

    def announce(self, ref: Ref, places: dict[str, int]) -> bool:
        """A proxy is there, with so many places by class; one of the same node is gone. Whether that is news."""
        now = ServingProxy(ref, places)
        self._begun = self._begun or now.serves
        if now in self.found.members:
            return False
        others = [member for member in self.found.members if member.ref.node.name != ref.node.name]
        self._become([*others, now])
        return True

    def leave(self, node: str) -> None:
        """A node's proxy is there no more."""
        self._become([member for member in self.found.members if member.ref.node.name != node])

    def _become(self, members: list[ServingProxy]) -> None:
        epoch, number = self.found.order
        self.hear(ProxySet(sorted(members, key=_name), (epoch, number + 1)))


def _told(listener: Listener, found: ProxySet) -> Exception | None:
    try:
        listener(found)
    except Exception as error:  # the others are told all the same, and then it is raised
        return error
    return None


def _name(member: ServingProxy) -> str:
    return member.ref.node.name
