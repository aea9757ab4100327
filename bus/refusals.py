"""What a node refuses: every refusal is counted, each peer's first is logged, and no peer can make the log, or this
bookkeeping, grow without bound."""

from __future__ import annotations

import logging
from collections import Counter

log = logging.getLogger(__name__)

TOLD_AT_MOST = 200
"""Refusals that are logged, each of another peer; what comes after is only counted."""


class Refusals:
    """See the module docstring."""

    def __init__(self, node: str, counters: Counter[str]) -> None:
        self._node = node
        self._counters = counters
        self._told: set[str] = set()

    def note(self, counter: str, text: str) -> None:
        """``text`` says what was refused of whom: what reads the same is the same peer's."""
        self._counters[counter] += 1
        if text in self._told or len(self._told) >= TOLD_AT_MOST:
            return
        self._told.add(text)
        last = "; further peers that are refused are only counted" if len(self._told) == TOLD_AT_MOST else ""
        log.warning("node %s refuses %s (%s counts it)%s", self._node, text, counter, last)
