"""What happened to each ticket, and when: the part of its life that the journal does not tell.

Invariant: the life in this sitting is known whole of all tickets that live, and of the last ``REMEMBERED`` that ended.
What is older is read from the journal (``life_in``), which has every transition of every sitting, without times.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import msgspec

from actors.env.messages import Ticket
from coordinator.orders import Moment
from coordinator.scheduling.journal import Event

REMEMBERED = 20_000

ENDS = ("trained", "lost", "evicted", "ended")
"""What a ticket's life ends with. What was trained may yet be undone, by going back to a checkpoint."""


class Life(msgspec.Struct):
    """One ticket's."""

    ticket: Ticket | None = None
    stream: str = ""
    host: str = ""
    moments: list[tuple[float, str, str]] = []  # when, what, and a word about it


class Lives:
    """See the module docstring. ``clock`` is the event loop's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._live: dict[str, Life] = {}
        self._ended: OrderedDict[str, Life] = OrderedDict()

    def note(self, id_: str, what: str, detail: str = "") -> Life:
        """Returns its life, to be told more of it. What comes after its end does not begin it anew."""
        life = self.of(id_)
        if life is None:
            life = self._live[id_] = Life()
        life.moments.append((self._clock(), what, detail))
        if what in ENDS and id_ in self._live:
            self._end(id_)
        return life

    def transition(self, event: Event) -> None:
        """One of the ledger's."""
        for id_ in event.tickets:
            self.note(id_, "stored" if event.event == "resumed" else event.event, _word(event))

    def of(self, id_: str) -> Life | None:
        return self._live.get(id_) or self._ended.get(id_)

    def moments(self, life: Life) -> list[Moment]:
        now = self._clock()
        return [Moment(what, detail, now - when) for when, what, detail in life.moments]

    def _end(self, id_: str) -> None:
        self._ended[id_] = self._live.pop(id_)
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)


def life_in(journal: Path, id_: str) -> list[Moment]:
    """What a journal on disk says of a ticket; empty where it says nothing. Reads all of it: not for an event loop."""
    wanted = b'"%s"' % id_.encode()
    found = []
    try:
        with journal.open("rb") as lines:
            for line in lines:
                if wanted in line and line.endswith(b"\n"):  # the last one may not be whole
                    event = msgspec.json.decode(line, type=Event)
                    if id_ in event.tickets:
                        found.append(Moment(event.event, _word(event)))
    except FileNotFoundError:
        return []
    return found


def _word(event: Event) -> str:
    if event.event == "trained":
        return f"into version {event.version}"
    if event.event == "stored":
        return f"began under version {event.version}"
    if event.event == "resumed":
        return f"again, by going back to version {event.version}"
    return ": ".join(part for part in (event.reason, event.detail) if part)
