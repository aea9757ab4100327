"""Tokens that outlive the engine which sampled them: its host tells them while requests go on, the proxy keeps them.

    host:   Reports.due -> Engine.sampled -> packed into one SampledSoFar -> the proxy acknowledges -> told
    proxy:  Kept.take  ... the engine dies ... Kept.along: the request goes on elsewhere behind them
              | KeptSoFar
    who asked: Kept.take  ... the proxy dies ... Kept.along: the same, by way of another proxy

Invariants:

- a report begins, for each request, where the last one that was acknowledged has ended; what the proxy keeps of a
  request is an unbroken row that begins where the tokens end which the request brings with it, and is shorter than
  ``max_tokens``. It is forgotten with the answer;
- alternatives are not reported: a request that wants some begins again;
- only requests that were here at the last report are told of: one that is answered within a period costs nothing. So a
  death costs each request what was sampled within a period and, where it was younger, a second one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from actors.proxy.engines.protocol import Begun
from actors.proxy.messages import Add, SampledSoFar

Part = tuple[str, int, Begun]
"""A request, how many tokens it had before, and what came behind them."""


class Reports:
    """An engine's side: how much of what is here has been told."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}  # tokens of each request that was here at the last report

    def due(self, here: Mapping[str, object], brought: Mapping[str, int]) -> list[tuple[str, int]]:
        """The requests to be told of, and how many tokens of each the proxy has; ``here``: all that are unfinished."""
        due = [(id_, told) for id_, told in self._told.items() if id_ in here]
        self._told = dict(due) | {id_: brought.get(id_, 0) for id_ in here if id_ not in self._told}
        return due

    def told(self, parts: Sequence[Part]) -> None:
        """The proxy has these."""
        for id_, since, part in parts:
            if id_ in self._told:
                self._told[id_] = since + len(part.tokens)

    def comes(self, request_id: str) -> None:
        """A request has come, perhaps not for the first time."""
        self._told.pop(request_id, None)


class Kept:
    """The proxy's side."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._parts: dict[str, list[Begun]] = {}
        self._ends: dict[str, int] = {}  # place behind the last token of each request

    def __len__(self) -> int:
        return len(self._parts)

    def take(self, report: SampledSoFar, in_flight: Mapping[str, Add]) -> list[Part]:
        """``in_flight``: what the engine is known to be at. Others were answered or moved meanwhile. Returns what came
        behind what was kept before."""
        new = []
        for id_, since, part in unpack(report):
            if id_ in in_flight and not in_flight[id_].request.logprobs:
                new += self._take(in_flight[id_], since, part)
        return new

    def _take(self, add: Add, since: int, part: Begun) -> list[Part]:
        id_ = add.request.request_id
        end = self._ends.get(id_, _brought(add))
        known, after = end - since, since + len(part.tokens)
        if known < 0 or after >= add.request.max_tokens:
            self._counters["reports_not_kept"] += 1  # what lies between never came; or no such request could go on
        elif after > end:
            behind = _behind(part, known)
            self._parts.setdefault(id_, []).append(behind)
            self._ends[id_] = after
            return [(id_, end, behind)]
        return []

    def along(self, add: Add) -> Add:
        """A request with all tokens that are known of it, for another engine to go on behind; they are kept no more."""
        id_ = add.request.request_id
        parts, end = self._parts.pop(id_, []), self._ends.pop(id_, 0)
        count = sum(len(part.tokens) for part in parts)
        if not count or end - count != _brought(add):  # its engine has given it back with more
            return add
        if add.request.begun is not None:
            parts.insert(0, add.request.begun)
        self._counters["tokens_kept"] += count
        return with_begun(add, _joined(parts))

    def forget(self, request_id: str) -> None:
        """It has had its answer."""
        self._parts.pop(request_id, None)
        self._ends.pop(request_id, None)


def with_begun(add: Add, begun: Begun | None) -> Add:
    """The same request with other tokens to go on from, or none."""
    return msgspec.structs.replace(add, request=msgspec.structs.replace(add.request, begun=begun))


def pack(engine: str, parts: Sequence[Part]) -> SampledSoFar:
    """One message, whose arrays are the requests' one behind another."""
    begun = [part for _, _, part in parts]
    return SampledSoFar(
        engine,
        [id_ for id_, _, _ in parts],
        np.array([since for _, since, _ in parts], np.int32),
        np.array([len(part.tokens) for part in begun], np.int32),
        np.concatenate([part.tokens for part in begun]),
        np.concatenate([part.logprobs for part in begun]),
        np.concatenate([part.versions for part in begun]),
    )


def unpack(report: SampledSoFar) -> Iterator[Part]:
    """The opposite; arrays are copies, or each would keep the whole message."""
    start = 0
    for id_, since, count in zip(report.request_ids, report.since.tolist(), report.counts.tolist(), strict=True):
        place = slice(start, start + count)
        begun = Begun(report.tokens[place].copy(), report.logprobs[place].copy(), report.versions[place].copy())
        yield id_, since, begun
        start += count


def sampled_so_far(report: SampledSoFar, in_flight: Mapping[str, Add]) -> Iterator[tuple[str, int]]:
    """How many tokens each request has, without what it had brought."""
    for id_, end in zip(report.request_ids, (report.since + report.counts).tolist(), strict=True):
        if id_ in in_flight:
            yield id_, end - _brought(in_flight[id_])


def _brought(add: Add) -> int:
    return 0 if add.request.begun is None else len(add.request.begun.tokens)


def _behind(part: Begun, count: int) -> Begun:
    return Begun(part.tokens[count:], part.logprobs[count:], part.versions[count:])


def _joined(parts: Sequence[Begun]) -> Begun:
    return Begun(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.versions for part in parts]),
    )
