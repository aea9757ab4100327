"""The semantics of delivery as a plain-Python model, which judges histories.

It knows no frames, ids, books or credits: only who sent what to whom, which incarnation handled it, and how it ended.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from tests.bus.history import (
    AnyEvent,
    Down,
    Dropped,
    Ended,
    Event,
    Finished,
    Handled,
    History,
    Life,
    Lost,
    Refused,
    Sent,
    Staffed,
    Taken,
    Told,
    Unwatched,
    Up,
    Watched,
    Yielded,
)

WINDOW = 16
"""Items of a stream that may be on their way to a reader who has not taken them."""

NAMED = {
    "DeadlineExceeded",
    "PeerLost",
    "PeerRestarted",
    "NoSuchActor",
    "NotBegun",
    "ActorStopped",
    "Overloaded",
    "RemoteError",
    "Superseded",
}


LOSSES = {"ObjectGone", "PeerLost", "PeerRestarted"}


def violations(history: History) -> list[str]:
    """What contradicts the semantics; each begins with the name of the guarantee."""
    model = _Model(history)
    for event in history.events:
        model.step(event)
    return [*model.found, *model.at_the_end()]


class _Model:
    def __init__(self, history: History) -> None:
        self.found: list[str] = []
        self.history = history
        self.up: dict[str, list[Life]] = defaultdict(list)  # node -> incarnations, oldest first
        self.down: dict[Life, Down] = {}
        self._alone: dict[Life, float] = {}  # those whose actor is not there yet: since when
        self._late: set[Life] = set()  # those that were so for a while
        self._lost: set[tuple[Life, Life]] = set()
        self._sent: dict[int, Sent] = {}
        self._place: dict[int, int] = {}  # op -> its place among what its sender sent
        self._dropped: set[int] = set()
        self._refused = 0  # tells
        self._handled: dict[int, Counter[Life]] = defaultdict(Counter)
        self._order: dict[tuple[Life, Life, int], int] = {}  # sender, receiver, lane -> place of the last one handled
        self._heard: dict[tuple[Life, str], int] = {}  # receiver, sender's node -> newest epoch handled there
        self._heard_at: dict[tuple[Life, str], list[tuple[int, float]]] = defaultdict(list)
        self._yielded: Counter[int] = Counter()
        self._finished: Counter[int] = Counter()
        self._taken: Counter[int] = Counter()
        self._ended: dict[int, Ended] = {}
        self._watches = _Watches(self)

    def blame(self, guarantee: str, event: Event | None, text: str) -> None:
        when = f"at {event.at:.6f} s: " if event is not None else ""
        self.found.append(f"{guarantee}: {when}{text}")

    # ---- event by event ------------------------------------------------------------------------------------------

    def step(self, event: AnyEvent) -> None:
        match event:
            case Up() | Staffed() | Down():
                self._on_life(event)
            case Lost():
                self._lost.add((event.life, event.other))
            case Sent():
                self._place[event.op] = len(self._sent)
                self._sent[event.op] = event
            case Dropped():
                self._dropped.add(event.op)
            case Refused():
                self._refused += 1
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
            case Watched() | Told() | Unwatched():
                self._watches.step(event)

    def _on_life(self, event: Up | Staffed | Down) -> None:
        life = event.life
        match event:
            case Up():
                self.up[life.node].append(life)
                self._alone[life] = event.at
            case Staffed():
                if self._alone.pop(life, event.at) < event.at:
                    self._late.add(life)
            case Down():
                self.down.setdefault(life, event)

    def _on_handled(self, event: Handled) -> None:
        sent = self._sent.get(event.op)
        here = event.life
        if sent is None or sent.life != event.by:
            self.blame("no message from nowhere", event, f"{here} handled {event.op}, which {event.by} never sent")
            return
        if sent.to != here.node or sent.epoch not in (0, here.epoch) or sent.vanished:
            self.blame("no wrong incarnation", event, f"{here} handled {event.op}, meant for {sent.to}/{sent.epoch}")
        newest = self._heard.get((here, event.by.node), 0)
        if event.by.epoch < newest:
            self.blame("no stale sender", event, f"{here} handled {event.op} of {event.by}, after /{newest}")
        if event.by.epoch > newest:
            self._heard[here, event.by.node] = event.by.epoch
            self._heard_at[here, event.by.node].append((event.by.epoch, event.at))
        self._handled[event.op][here] += 1
        once = sent.retries > 0 or self.history.orderly
        if once and self._handled[event.op][here] > 1:
            what = "once per incarnation" if sent.retries else "at most once"
            self.blame(what, event, f"{here} handled {sent.kind} {event.op} again")
        if (sent.named or not sent.retries) and self.history.orderly:
            if len(self._handled[event.op]) > 1:
                lives = ", ".join(map(str, self._handled[event.op]))
                self.blame("at most once", event, f"{sent.kind} {event.op} was handled by {lives}")
            self._in_order(event, sent)

    def _in_order(self, event: Handled, sent: Sent) -> None:
        key, place = (event.by, event.life, sent.lane), self._place[event.op]
        if not sent.in_turn:
            return
        if place < self._order.get(key, -1):
            self.blame("order", event, f"{event.life} handled {event.op} of {event.by} after a later one")
        self._order[key] = max(place, self._order.get(key, -1))

    def _on_yielded(self, event: Yielded) -> None:
        self._yielded[event.op] += 1
        once = sum(self._handled[event.op].values()) == 1  # else a network doubled the request
        ahead = self._yielded[event.op] - self._taken[event.op]
        late = 1 if self.history.slack_s else 0  # in real time, what is taken may be noted after its credit is used
        if ahead > WINDOW + late and once:
            self.blame("credit", event, f"stream {event.op} is {ahead} items ahead of its reader")

    def _on_taken(self, event: Taken) -> None:
        if event.index != self._taken[event.op]:
            self.blame("streams in order", event, f"{event.op} gave {event.index} after {self._taken[event.op]} items")
        self._taken[event.op] += 1

    def _on_ended(self, event: Ended) -> None:
        sent = self._sent[event.op]
        if event.op in self._ended:
            self.blame("one end", event, f"{event.op} ended twice: {self._ended[event.op].how}, {event.how}")
            return
        self._ended[event.op] = event
        limit = sent.at + sent.timeout_s
        if sent.kind == "ask" and event.at > limit + self.history.slack_s:
            self.blame("deadline", event, f"{event.op} ended {event.at - limit:.6f} s too late, in {event.how}")
        if event.how == "reply":
            self._on_reply(event, sent)
        elif event.how == "end":
            if self._taken[event.op] != sent.items:
                self.blame("streams complete", event, f"{event.op} ended after {self._taken[event.op]} of {sent.items}")
        elif event.how != "left":
            self._on_error(event, sent)

    def _on_reply(self, event: Ended, sent: Sent) -> None:
        by = event.answered
        if event.about != event.op or by is None or not self._handled[event.op][by]:
            self.blame("its own reply", event, f"{event.op} was answered with that to {event.about} by {by}")
        elif sent.epoch not in (0, by.epoch) or by.node != sent.to:
            self.blame("no wrong incarnation", event, f"{event.op} to {sent.to}/{sent.epoch} was answered by {by}")
        elif sent.fails:
            self.blame("its own reply", event, f"{event.op} was to fail, and was answered")

    def _on_error(self, event: Ended, sent: Sent) -> None:
        how = event.how
        if how not in NAMED:
            self.blame("named errors", event, f"{event.op} ended in {how}")
        elif how == "DeadlineExceeded":
            if sent.kind == "ask" and event.at < sent.at + sent.timeout_s - self.history.slack_s:
                self.blame("deadline", event, f"{event.op} ended before its time")
        elif how == "PeerRestarted":
            if not self._has_successor(sent):
                self.blame("true losses", event, f"{event.op}: {sent.to}/{sent.epoch} has no successor")
        elif how == "PeerLost":
            self._on_loss(event, sent)
        elif how == "Superseded":
            self._on_superseded(event, sent)
        elif how == "RemoteError" and not self._may_have_failed(event, sent):
            self.blame("its own reply", event, f"{event.op} failed with {event.remote}")
        elif how == "Overloaded" and not self.history.crowded:
            self.blame("true losses", event, f"{event.op}: nothing was full")
        elif how in ("NotBegun", "ActorStopped", "NoSuchActor"):
            self._on_refusal(event, sent)

    def _may_have_failed(self, event: Ended, sent: Sent) -> bool:
        """At its handler: as it was to, or since there it is thought that the asker, whose object it needs, is gone."""
        if sent.lends and event.remote in LOSSES:
            return self.suspected(sent.life.node, sent.to)
        return sent.fails and event.remote == "Deliberate"

    def _on_refusal(self, event: Ended, sent: Sent) -> None:
        """The actor was not there, or ended meanwhile."""
        begun = sum(self._handled[event.op].values()) > 0
        if event.how == "NotBegun" and begun:
            self.blame("not begun", event, f"{event.op} was handled all the same")
        if event.how == "NoSuchActor" and not sent.named and not (sent.retries and sent.epoch == 0):
            self.blame("not begun", event, f"{event.op}: it is known whether it was")
        if not sent.vanished and not self.was_away(sent.to):
            self.blame("true losses", event, f"{event.op}: the actor is there")

    def _has_successor(self, sent: Sent) -> bool:
        """Who asks whichever answers is never told of one; a name may stand for an incarnation that has one."""
        if sent.named:
            return len(self.up[sent.to]) > 1
        return sent.epoch != 0 and any(life.epoch > sent.epoch for life in self.up[sent.to])

    def _on_loss(self, event: Ended, sent: Sent) -> None:
        known = (Life(sent.to, sent.epoch) in self.down) if sent.epoch else self._gone(sent)
        told = any(one == event.life and other.node == sent.to for one, other in self._lost)
        lossy_stream = sent.kind == "stream" and not self.history.calm
        if not (known or told or lossy_stream or event.life in self.down):
            self.blame("true losses", event, f"{event.op}: {sent.to}/{sent.epoch} is not gone")

    def _on_superseded(self, event: Ended, sent: Sent) -> None:
        """The asker has a successor, has begun to end, or was thought lost by whom it asked."""
        later = any(life.epoch > event.life.epoch for life in self.up[event.life.node])
        if not (later or event.life in self.down or self.suspected(event.life.node, sent.to)):
            self.blame("true losses", event, f"{event.op}: {event.life} is as good as any")

    def was_away(self, node: str) -> bool:
        """Whether there was a time at which a node's actor was not there."""
        return any(life in self.down or life in self._alone or life in self._late for life in self.up[node])

    def _gone(self, sent: Sent) -> bool:
        """Whether any incarnation that this may have been meant for has ended."""
        return any(self.ended_early(life) for life in self.up[sent.to] if sent.epoch in (0, life.epoch))

    def ended_early(self, life: Life) -> bool:
        """Whether an incarnation ended before the history did."""
        return life in self.down and self.down[life].at < self.history.over_at

    # ---- when all is over ----------------------------------------------------------------------------------------

    def at_the_end(self) -> list[str]:
        self.found = []
        missing: list[Sent] = []
        for sent in self._sent.values():
            over = self._ended.get(sent.op)
            moot = self.ended_early(sent.life) and over is None
            if sent.kind != "tell" and not moot:
                self._check_end(sent, over)
            if sent.kind == "tell" and not self._handled[sent.op] and not self._has_a_reason(sent):
                missing.append(sent)
        for sent in missing if len(missing) > self._refused else []:
            self.blame("nothing vanishes", None, f"tell {sent.op} from {sent.life} to {sent.to}/{sent.epoch}")
        for op, sent in self._sent.items():
            begun = sum(count for life, count in self._handled[op].items() if not self._killed(life))
            if sent.kind == "stream" and self._finished[op] < begun:
                self.blame("nothing left over", None, f"a handler of stream {op} never ended")
        self._watches.at_the_end()
        for text in self.history.left_over:
            self.blame("nothing left over", None, text)
        return self.found

    def _killed(self, life: Life) -> bool:
        return life in self.down and self.down[life].killed

    def _check_end(self, sent: Sent, over: Ended | None) -> None:
        if over is None:
            self.blame("one end", None, f"{sent.kind} {sent.op} never ended")
            return
        expected = {"NotBegun"} if sent.vanished else {"RemoteError"} if sent.fails else {"reply", "end"}
        expected.add("left")
        if sent.late:
            expected.add("DeadlineExceeded")
        if self.history.calm and over.how not in expected:
            self.blame("calm", over, f"{sent.op} ended in {over.how}")
        heard = [at for epoch, at in self._heard_at[sent.life, sent.to] if epoch > sent.epoch > 0]
        late = [at for at in heard if at + self.history.slack_s < over.at]
        gone = any(self.ended_early(life) or (sent.life, life) in self._lost for life in self.up[sent.to])
        told = over.how == "PeerRestarted" or (over.how == "PeerLost" and gone)
        if sent.kind == "ask" and late and not told and not self.ended_early(sent.life):
            self.blame(
                "PeerRestarted", over, f"{sent.op}: a successor of {sent.to}/{sent.epoch} was heard, yet {over.how}"
            )

    def _has_a_reason(self, sent: Sent) -> bool:
        """Whether a tell that nobody handled may be lost."""
        ends = self.ended_early(sent.life) or self._gone(sent) or sent.vanished or not self.up[sent.to]
        past = sent.epoch != 0 and any(life.epoch > sent.epoch for life in self.up[sent.to])
        return ends or past or self.suspected(sent.life.node, sent.to) or sent.op in self._dropped

    def suspected(self, one: str, other: str) -> bool:
        """Whether either of two nodes took the other one for lost."""
        return any({life.node, lost.node} == {one, other} for life, lost in self._lost)


class _Watches:
    """Who is told of whose end."""

    def __init__(self, model: _Model) -> None:
        self._model = model
        self._watched: dict[int, Watched] = {}
        self._told: set[int] = set()  # or no longer to be told

    def step(self, event: Watched | Told | Unwatched) -> None:
        match event:
            case Watched():
                self._watched[event.watch] = event
            case Told():
                self._on_told(event)
            case Unwatched():
                self._told.add(event.watch)

    def _on_told(self, event: Told) -> None:
        model, watched = self._model, self._watched[event.watch]
        if event.watch in self._told:
            model.blame("one Down", event, f"watch {event.watch} was told again, or after it was taken back")
        self._told.add(event.watch)
        lives = model.up[watched.to]
        ended = any(life in model.down for life in lives if watched.epoch in (0, life.epoch))
        true = {
            "stopped": ended,
            "no_such_actor": watched.vanished or model.was_away(watched.to),
            "node_restarted": any(life.epoch > watched.epoch for life in lives),
            "node_lost": ended or not model.history.calm,
            "linked": ended or model.suspected(watched.life.node, watched.to),
        }
        if not true.get(event.kind, False):
            model.blame("true losses", event, f"watch {event.watch} of {watched.to}/{watched.epoch}: {event.kind}")

    def at_the_end(self) -> None:
        model = self._model
        for watched in self._watched.values():
            over = watched.vanished or model.ended_early(Life(watched.to, watched.epoch))
            if over and watched.watch not in self._told and not model.ended_early(watched.life):
                model.blame("every Down", watched, f"{watched.life} was not told of {watched.to}/{watched.epoch}")
