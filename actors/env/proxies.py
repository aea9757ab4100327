"""Which proxy each trajectory of an env host is with.

    a trajectory's first turn --> the hash ring, by places that serve --> that proxy, as long as it is there and serves
                                        ^                                        |
                                        +-- it is gone, or nothing serves there -+

Invariants:

- a trajectory stays with its proxy, which has its prefix: another set of proxies moves those of the ones that are gone
  (or serve nothing while others do) and no others;
- the ring is the same in every env host, so that all share the load alike. Where the job declares a class of hardware
  for a task, only proxies with places of that class are on its ring, as long as there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from actors.core import Node, Ref
from actors.core.leader import Successive
from actors.core.ring import Ring
from actors.proxy.messages import Accepted, Add, ProxySet, ServingProxy, TrajectoryEnded
from actors.proxy.routing import preferred_class
from bus.message import PeerLost

Listener = Callable[[ProxySet], object]


class Proxies(Successive):
    """See the module docstring. ``affinity``: task -> its declared class; ``patience_s`` and ``late_s``: how long an
    ask waits for another proxy, where its own is gone or does not answer."""

    def __init__(
        self,
        found: ProxySet | None = None,
        *,
        affinity: Mapping[str, str] | None = None,
        patience_s: float = 0.0,
        late_s: float = 0.0,
    ) -> None:
        super().__init__(patience_s=patience_s, late_s=late_s)
        self._affinity = affinity or {}
        self._members: dict[str, ServingProxy] = {}  # by the name of their node
        self._rings: dict[
            str | None, tuple[dict[str, float], Ring]
        ] = {}  # by the class that a task prefers; its weights
        self._served: set[Ref] = set()  # of these, those that have served
        self._with: dict[str, Ref] = {}  # trajectory -> its proxy
        self._moved: set[str] = set()  # trajectories that have been with another one before
        self._listeners: list[Listener] = []
        if found is not None:
            self.follow(found)

    @classmethod
    def only(cls, ref: Ref) -> Proxies:
        """One, which has no successor."""
        return cls(ProxySet([ServingProxy(ref)]))

    def follow(self, found: ProxySet) -> None:
        """These from now on."""
        self._members = {member.ref.node.name: member for member in found.members}
        serving = {member.ref for member in found.members if member.serves}
        self._served = {member.ref for member in found.members} & (self._served | serving)
        self._rings = {
            of: (weights, ring) for of, (weights, ring) in self._rings.items() if weights == self._weights(of)
        }
        self._followed.set()
        for listener in self._listeners:
            listener(found)

    def on_follow(self, listener: Listener) -> None:
        """Told whenever there are others, or others of them serve."""
        self._listeners.append(listener)

    def _ring(self, preferred: str | None) -> Ring:
        if preferred not in self._rings:
            weights = self._weights(preferred)
            self._rings[preferred] = weights, Ring(list(weights), weights=weights)
        return self._rings[preferred][1]

    def _weights(self, preferred: str | None) -> dict[str, float]:
        members = self._members
        of_class = {name: float(member.places.get(preferred or "", 0)) for name, member in members.items()}
        of_all = {name: float(sum(member.places.values())) for name, member in members.items()}
        for weights in (of_class, of_all):
            serving = {name: places for name, places in weights.items() if places > 0}
            if serving:
                return serving
        return dict.fromkeys(members, 1.0)  # none serves yet: each queues its share

    # ---- a trajectory's ------------------------------------------------------------------------------------------

    @property
    def trajectories(self) -> int:
        """That are with one."""
        return len(self._with)

    @property
    def refs(self) -> list[Ref]:
        return [member.ref for member in self._members.values()]

    def has(self, ref: Ref) -> bool:
        """Whether a proxy is one of them."""
        member = self._members.get(ref.node.name)
        return member is not None and member.ref == ref

    def stopped(self, ref: Ref) -> bool:
        """Whether a proxy of these has served, does not any more, and another one does. One that has not begun yet is
        waited for: else all that was asked first would go to the first one that begins."""
        return ref in self._served and self.has(ref) and not self._keeps(ref)

    def of(self, trajectory: str, task: str = "default") -> Ref | None:
        """The proxy that a trajectory is with; None where there is none just now."""
        held = self._with.get(trajectory)
        if (held is not None and self._keeps(held)) or not self._members:
            return held
        ref = self._members[self._ring(preferred_class(self._affinity, task)).owner(trajectory)].ref
        if held is not None:
            self._moved.add(trajectory)
        self._with[trajectory] = ref
        return ref

    def _keeps(self, held: Ref) -> bool:
        member = self._members.get(held.node.name)
        if member is None or member.ref != held:
            return False
        return member.serves or not any(each.serves for each in self._members.values())

    async def add(self, node: Node, add: Add, *, timeout_s: float, retries: int = 0) -> Ref:
        """Ask the proxy that a trajectory is with, whichever that is in the end, and return it. Raises what the last
        one's ask raised."""
        trajectory = add.request.trajectory
        asked = self._with.get(trajectory)

        def whom() -> Ref | None:
            nonlocal asked
            before, asked = asked, self.of(trajectory, add.domain)
            if before is not None and before != asked and self.has(before):  # it is there, and nothing serves
                node.tell(before, TrajectoryEnded(trajectory, whole=False, moved=True))
            return asked

        about = f"trajectory {trajectory}"
        await self.ask_of(whom, node, add, Accepted, timeout_s=timeout_s, retries=retries, about=about)
        if asked is None:
            raise PeerLost(f"no proxy is there for {about}")
        return asked

    def tell(self, node: Node, trajectory: str, message: Any) -> None:
        """At most once, to the proxy that a trajectory is with, whether it serves or not; to the one that it would ask
        where it has asked for nothing yet."""
        ref = self._with.get(trajectory)
        if ref is None:
            ref = self.of(trajectory)
        if ref is not None and self.has(ref):
            node.tell(ref, message)

    def ended(self, node: Node, trajectory: str, *, whole: bool) -> None:
        """Nothing more will be asked for it. Who has seen only a part of it learns nothing of its length."""
        self.tell(node, trajectory, TrajectoryEnded(trajectory, whole and trajectory not in self._moved))
        self._with.pop(trajectory, None)
        self._moved.discard(trajectory)
