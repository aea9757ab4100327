"""Who is next among flows that share something scarce: deficit round robin (Shreedhar and Varghese, 1995), and within
a flow the oldest group.

Guarantees, per take and independent of how many wait:

- while two flows have something waiting, the takes of each, divided by its quantum, differ by less than 3: the shares
  are those of the weights, and no flow with a waiting ticket is passed over for more than one round (a round is as many
  takes as the quanta sum to);
- within a flow a ticket is overtaken only by tickets of older groups, of which there are finitely many, so that groups
  are completed in the order in which they were begun, and none starves.

A quantum is a flow's weight over the smallest weight above 0; a flow without weight (its tasks are no longer wanted,
but its tickets must still end) has the smallest.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping

import msgspec

MOST_GONE = 64
"""Removed tickets that a flow's heap may hold beside as many as wait, before it is cleared of them."""


class Item(msgspec.Struct):
    """What waits: a ticket by its name."""

    id: str
    flow: str
    group: int
    number: int  # tickets of one group go in this order


class _Flow:
    def __init__(self) -> None:
        self.heap: list[tuple[int, int, str]] = []
        self.deficit = 0.0


class FairQueue:
    """See the module docstring."""

    def __init__(self) -> None:
        self._items: OrderedDict[str, Item] = OrderedDict()
        self._flows: OrderedDict[str, _Flow] = OrderedDict()  # those with something waiting; the first one is served
        self._waiting: dict[str, int] = {}  # by flow
        self._quanta: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, id_: str) -> bool:
        return id_ in self._items

    def __iter__(self) -> Iterator[str]:
        """Longest waiting first."""
        return iter(self._items)

    @property
    def waiting(self) -> dict[str, int]:
        """How many, by flow."""
        return dict(self._waiting)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """From now on; flows that are not named weigh 1."""
        smallest = min((weight for weight in weights.values() if weight > 0), default=1.0)
        self._quanta = {flow: max(weight / smallest, 1.0) for flow, weight in weights.items()}

    def quantum(self, flow: str) -> float:
        return self._quanta.get(flow, 1.0)

    def add(self, item: Item) -> None:
        """One that waits already is left as it is."""
        if item.id in self._items:
            return
        self._items[item.id] = item
        flow = self._flows.get(item.flow)
        if flow is None:
            flow = self._flows[item.flow] = _Flow()
        heapq.heappush(flow.heap, (item.group, item.number, item.id))
        self._waiting[item.flow] = self._waiting.get(item.flow, 0) + 1

    def take(self) -> Item | None:
        """The next one; None where nothing waits."""
        while self._flows:
            name, flow = next(iter(self._flows.items()))
            if not self._waiting.get(name):
                del self._flows[name]  # and its deficit: an idle flow saves nothing up
                continue
            if flow.deficit < 1.0:
                flow.deficit += self.quantum(name)
            group, number, id_ = heapq.heappop(flow.heap)
            item = self._items.get(id_)
            if item is None or (item.group, item.number) != (group, number):  # it was removed
                continue
            flow.deficit -= 1.0
            if flow.deficit < 1.0:
                self._flows.move_to_end(name)
            return self._forget(id_)
        return None

    def remove(self, id_: str) -> Item | None:
        """It waits no longer; None where it did not."""
        if id_ not in self._items:
            return None
        item = self._forget(id_)
        flow = self._flows[item.flow]
        if len(flow.heap) > 2 * self._waiting.get(item.flow, 0) + MOST_GONE:
            flow.heap = [entry for entry in flow.heap if entry[2] in self._items]
            heapq.heapify(flow.heap)
        return item

    def before(self, id_: str) -> int:
        """How many of its own flow are served before it; in time that grows with how many wait."""
        item = self._items[id_]
        key = (item.group, item.number)
        return sum(other.flow == item.flow and (other.group, other.number) < key for other in self._items.values())

    def _forget(self, id_: str) -> Item:
        item = self._items.pop(id_)
        left = self._waiting[item.flow] - 1
        if left:
            self._waiting[item.flow] = left
        else:
            del self._waiting[item.flow]
        return item
