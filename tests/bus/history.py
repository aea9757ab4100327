"""What nodes did, as a list of events, and the semantics of delivery as a plain-Python model that judges it.

The model knows no frames, ids, books or credits: only who sent what to whom, which incarnation handled it, and how it
ended. The same model judges histories of the simulated network and those of processes over ZeroMQ.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Literal

import msgspec

WINDOW = 16
"""Items of a stream that may be on their way to a reader who has not taken them."""

Kind = Literal["tell", "ask", "stream"]


class Life(msgspec.Struct, frozen=True, order=True):
    """An incarnation of a node."""

    node: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.node}/{self.epoch}"


class Event(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    at: float  # seconds on the one clock of all nodes
    life: Life  # where it happened


class Up(Event, frozen=True):
    """From now on it listens."""


class Down(Event, frozen=True):
    """From now on it does nothing more (it was killed), or it begins to close."""

    killed: bool


class Lost(Event, frozen=True):
    """This incarnation was told, or concluded, that another one is gone."""

    other: Life


class Sent(Event, frozen=True):
    """About to send."""

    op: int
    kind: Kind
    to: str
    epoch: int  # of the receiver; 0 is whichever answers
    lane: int = 0
    retries: int = 0
    timeout_s: float = 0.0
    fails: bool = False  # its handler is to raise
    items: int = 0  # of a stream
    vanished: bool = False  # there is no such actor
    late: bool = False  # its handler takes longer than it has
    in_turn: bool = True  # its handler begins when its turn comes, not beside others


class Dropped(Event, frozen=True):
    """The network, or the sender, says that this request was not delivered."""

    op: int


class Handled(Event, frozen=True):
    """A handler took it up."""

    op: int
    by: Life  # who says it sent it


class Yielded(Event, frozen=True):
    """An item of a stream was accepted for sending."""

    op: int
    index: int


class Finished(Event, frozen=True):
    """The handler of a stream ended, for whatever reason."""

    op: int


class Taken(Event, frozen=True):
    """A reader got an item."""

    op: int
    index: int


class Ended(Event, frozen=True):
    """An ask or a stream ended at its asker: "reply", "end", "left" (by its reader) or the name of an error."""

    op: int
    how: str
    answered: Life | None = None  # who handled it, as the reply says
    about: int = 0  # which op the reply answers
    remote: str = ""  # of a RemoteError: what the handler raised


AnyEvent = Up | Down | Lost | Sent | Dropped | Handled | Yielded | Finished | Taken | Ended


class History(msgspec.Struct):
    """All events in the order in which they happened."""

    events: list[AnyEvent]
    orderly: bool = True  # the network neither doubles nor overtakes, as TCP
    calm: bool = False  # nothing was lost, cut or killed: everything must succeed
    left_over: list[str] = []
    slack_s: float = 0.0  # by which real time may be late
    over_at: float = 1e18  # when the last nodes begin to close: by then everything must have come to its end


NAMED = {"DeadlineExceeded", "PeerLost", "PeerRestarted", "NoSuchActor", "Overloaded", "RemoteError"}


def violations(history: History) -> list[str]:
    """What contradicts the semantics; each begins with the name of the guarantee."""
    model = _Model(history)
    for event in history.events:
        model.step(event)
    return [*model.found, *model.at_the_end()]


class _Model:
    def __init__(self, history: History) -> None:
        self.found: list[str] = []
        self._history = history
        self._up: dict[str, list[Life]] = defaultdict(list)  # node -> incarnations, oldest first
        self._down: dict[Life, Down] = {}
        self._lost: set[tuple[Life, Life]] = set()
        self._sent: dict[int, Sent] = {}
        self._place: dict[int, int] = {}  # op -> its place among what its sender sent
        self._dropped: set[int] = set()
        self._handled: dict[int, Counter[Life]] = defaultdict(Counter)
        self._order: dict[tuple[Life, Life, int], int] = {}  # sender, receiver, lane -> place of the last one handled
        self._heard: dict[tuple[Life, str], int] = {}  # receiver, sender's node -> newest epoch handled there
        self._heard_at: dict[tuple[Life, str], list[tuple[int, float]]] = defaultdict(list)
        self._yielded: Counter[int] = Counter()
        self._finished: Counter[int] = Counter()
        self._taken: Counter[int] = Counter()
        self._ended: dict[int, Ended] = {}

    def _blame(self, guarantee: str, event: Event | None, text: str) -> None:
        when = f"at {event.at:.6f} s: " if event is not None else ""
        self.found.append(f"{guarantee}: {when}{text}")

    # ---- event by event ------------------------------------------------------------------------------------------

    def step(self, event: AnyEvent) -> None:
        match event:
            case Up():
                self._up[event.life.node].append(event.life)
            case Down():
                self._down.setdefault(event.life, event)
            case Lost():
                self._lost.add((event.life, event.other))
            case Sent():
                self._place[event.op] = len(self._sent)
                self._sent[event.op] = event
            case Dropped():
                self._dropped.add(event.op)
            case Handled():
                self._on_handled(event)
            case Yielded():
                self._on_yielded(event)
            case Finished():
                self._finished[event.op] += 1
            case Taken():
                self._on_taken(event)
            case Ended():
                self._on_ended(event)

    def _on_handled(self, event: Handled) -> None:
        sent = self._sent.get(event.op)
        here = event.life
        if sent is None or sent.life != event.by:
            self._blame("no message from nowhere", event, f"{here} handled {event.op}, which {event.by} never sent")
            return
        if sent.to != here.node or sent.epoch not in (0, here.epoch) or sent.vanished:
            self._blame("no wrong incarnation", event, f"{here} handled {event.op}, meant for {sent.to}/{sent.epoch}")
        newest = self._heard.get((here, event.by.node), 0)
        if event.by.epoch < newest:
            self._blame("no stale sender", event, f"{here} handled {event.op} of {event.by}, after /{newest}")
        if event.by.epoch > newest:
            self._heard[here, event.by.node] = event.by.epoch
            self._heard_at[here, event.by.node].append((event.by.epoch, event.at))
        self._handled[event.op][here] += 1
        once = sent.retries > 0 or self._history.orderly
        if once and self._handled[event.op][here] > 1:
            what = "once per incarnation" if sent.retries else "at most once"
            self._blame(what, event, f"{here} handled {sent.kind} {event.op} again")
        if not sent.retries and self._history.orderly:
            if len(self._handled[event.op]) > 1:
                lives = ", ".join(map(str, self._handled[event.op]))
                self._blame("at most once", event, f"{sent.kind} {event.op} was handled by {lives}")
            self._in_order(event, sent)

    def _in_order(self, event: Handled, sent: Sent) -> None:
        key, place = (event.by, event.life, sent.lane), self._place[event.op]
        if not sent.in_turn:
            return
        if place < self._order.get(key, -1):
            self._blame("order", event, f"{event.life} handled {event.op} of {event.by} after a later one")
        self._order[key] = max(place, self._order.get(key, -1))

    def _on_yielded(self, event: Yielded) -> None:
        self._yielded[event.op] += 1
        once = sum(self._handled[event.op].values()) == 1  # else a network doubled the request
        ahead = self._yielded[event.op] - self._taken[event.op]
        late = 1 if self._history.slack_s else 0  # in real time, what is taken may be noted after its credit is used
        if ahead > WINDOW + late and once:
            self._blame("credit", event, f"stream {event.op} is {ahead} items ahead of its reader")

    def _on_taken(self, event: Taken) -> None:
        if event.index != self._taken[event.op]:
            self._blame("streams in order", event, f"{event.op} gave {event.index} after {self._taken[event.op]} items")
        self._taken[event.op] += 1

    def _on_ended(self, event: Ended) -> None:
        sent = self._sent[event.op]
        if event.op in self._ended:
            self._blame("one end", event, f"{event.op} ended twice: {self._ended[event.op].how}, {event.how}")
            return
        self._ended[event.op] = event
        limit = sent.at + sent.timeout_s
        if sent.kind == "ask" and event.at > limit + self._history.slack_s:
            self._blame("deadline", event, f"{event.op} ended {event.at - limit:.6f} s too late, in {event.how}")
        if event.how == "reply":
            self._on_reply(event, sent)
        elif event.how == "end":
            if self._taken[event.op] != sent.items:
                self._blame(
                    "streams complete", event, f"{event.op} ended after {self._taken[event.op]} of {sent.items}"
                )
        elif event.how != "left":
            self._on_error(event, sent)

    def _on_reply(self, event: Ended, sent: Sent) -> None:
        by = event.answered
        if event.about != event.op or by is None or not self._handled[event.op][by]:
            self._blame("its own reply", event, f"{event.op} was answered with that to {event.about} by {by}")
        elif sent.epoch not in (0, by.epoch) or by.node != sent.to:
            self._blame("no wrong incarnation", event, f"{event.op} to {sent.to}/{sent.epoch} was answered by {by}")
        elif sent.fails:
            self._blame("its own reply", event, f"{event.op} was to fail, and was answered")

    def _on_error(self, event: Ended, sent: Sent) -> None:
        how, epoch = event.how, sent.epoch
        if how not in NAMED:
            self._blame("named errors", event, f"{event.op} ended in {how}")
        elif how == "DeadlineExceeded":
            if sent.kind == "ask" and event.at < sent.at + sent.timeout_s - self._history.slack_s:
                self._blame("deadline", event, f"{event.op} ended before its time")
        elif how == "PeerRestarted":
            if epoch == 0 or not any(life.epoch > epoch for life in self._up[sent.to]):
                self._blame("true losses", event, f"{event.op}: {sent.to}/{epoch} has no successor")
        elif how == "PeerLost":
            self._on_loss(event, sent)
        elif how == "RemoteError" and not (sent.fails and event.remote == "Deliberate"):
            self._blame("its own reply", event, f"{event.op} failed with {event.remote}")
        elif how == "NoSuchActor" and not sent.vanished and not self._gone(sent):
            self._blame("true losses", event, f"{event.op}: the actor is there")

    def _on_loss(self, event: Ended, sent: Sent) -> None:
        known = (Life(sent.to, sent.epoch) in self._down) if sent.epoch else self._gone(sent)
        told = any(one == event.life and other.node == sent.to for one, other in self._lost)
        lossy_stream = sent.kind == "stream" and not self._history.calm
        if not (known or told or lossy_stream or event.life in self._down):
            self._blame("true losses", event, f"{event.op}: {sent.to}/{sent.epoch} is not gone")

    def _gone(self, sent: Sent) -> bool:
        """Whether any incarnation that this may have been meant for has ended."""
        return any(self._ended_early(life) for life in self._up[sent.to] if sent.epoch in (0, life.epoch))

    def _ended_early(self, life: Life) -> bool:
        """Whether an incarnation ended before the history did."""
        return life in self._down and self._down[life].at < self._history.over_at

    # ---- when all is over ----------------------------------------------------------------------------------------

    def at_the_end(self) -> list[str]:
        self.found = []
        for sent in self._sent.values():
            over = self._ended.get(sent.op)
            moot = self._ended_early(sent.life) and over is None
            if sent.kind != "tell" and not moot:
                self._check_end(sent, over)
            if sent.kind == "tell" and not self._handled[sent.op]:
                self._check_loss(sent)
        for op, sent in self._sent.items():
            begun = sum(count for life, count in self._handled[op].items() if not self._killed(life))
            if sent.kind == "stream" and self._finished[op] < begun:
                self._blame("nothing left over", None, f"a handler of stream {op} never ended")
        for text in self._history.left_over:
            self._blame("nothing left over", None, text)
        return self.found

    def _killed(self, life: Life) -> bool:
        return life in self._down and self._down[life].killed

    def _check_end(self, sent: Sent, over: Ended | None) -> None:
        if over is None:
            self._blame("one end", None, f"{sent.kind} {sent.op} never ended")
            return
        expected = {"NoSuchActor"} if sent.vanished else {"RemoteError"} if sent.fails else {"reply", "end"}
        expected.add("left")
        if sent.late:
            expected.add("DeadlineExceeded")
        if self._history.calm and over.how not in expected:
            self._blame("calm", over, f"{sent.op} ended in {over.how}")
        heard = [at for epoch, at in self._heard_at[sent.life, sent.to] if epoch > sent.epoch > 0]
        late = [at for at in heard if at + self._history.slack_s < over.at]
        gone = any(self._ended_early(life) or (sent.life, life) in self._lost for life in self._up[sent.to])
        told = over.how == "PeerRestarted" or (over.how == "PeerLost" and gone)
        if sent.kind == "ask" and late and not told and not self._ended_early(sent.life):
            self._blame(
                "PeerRestarted", over, f"{sent.op}: a successor of {sent.to}/{sent.epoch} was heard, yet {over.how}"
            )

    def _check_loss(self, sent: Sent) -> None:
        """A tell that nobody handled needs a reason."""
        ends = self._ended_early(sent.life) or self._gone(sent) or sent.vanished or not self._up[sent.to]
        past = sent.epoch != 0 and any(life.epoch > sent.epoch for life in self._up[sent.to])
        suspected = any({one.node, other.node} == {sent.life.node, sent.to} for one, other in self._lost)
        if not (ends or past or suspected or sent.op in self._dropped):
            self._blame("nothing vanishes", None, f"tell {sent.op} from {sent.life} to {sent.to}/{sent.epoch}")
