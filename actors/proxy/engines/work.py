"""What an engine computes, counted where it is computed: what its hardware reaches (``hwprobe.fitting``).

Invariant: what was counted is taken once, with the time that it took. A step in which nothing was counted has worked
on what a later one counts (a part of a long prompt): its time goes with that, unless the engine has nothing left by
then.

The engine counts within a step, in the thread that runs it, which then says how long the step took; what has added up
is taken in the event loop.
"""

from __future__ import annotations

import threading

from hwprobe.fitting import Work


class WorkMeter:
    """See the module docstring."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = Work(busy_s=0.0)
        self._prefill = 0
        self._decode = 0
        self._context = 0
        self._pending_s = 0.0  # of steps whose work is not counted yet

    def prefilled(self, tokens: int) -> None:
        """Tokens of prompts were computed that were not in the cache."""
        self._prefill += tokens

    def decoded(self, sequences: int, context: int) -> None:
        """So many sequences were given a token; ``context``: their lengths, added up."""
        self._decode += sequences
        self._context += context

    def step(self, seconds: float, steps: int = 1) -> bool:
        """What was counted since the last call took so long; ``steps``: where several were counted at once. Returns
        whether anything was."""
        self._pending_s += seconds
        if not self._prefill and not self._decode:
            return False
        work = Work(
            busy_s=self._pending_s,
            prefill_tokens=self._prefill,
            steps=steps if self._decode else 0,
            decode_tokens=self._decode,
            context_tokens=self._context,
        )
        self._prefill = self._decode = self._context = 0
        self._pending_s = 0.0
        with self._lock:
            self._sum += work
        return True

    def rest(self) -> None:
        """The engine has nothing unfinished: what steps have worked on without counting it was aborted."""
        self._pending_s = 0.0

    def take(self) -> Work | None:
        """All since the last call; None where nothing was computed."""
        with self._lock:
            work, self._sum = self._sum, Work(busy_s=0.0)
        return work if work.prefill_tokens or work.decode_tokens else None
