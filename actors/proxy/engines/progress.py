"""Whether an engine gets anywhere: what it is at, and for how long it has been at that without a result.

Invariants:

- time counts as fruitless while the engine has requests that it may run, from the last token that it computed, or from
  the first of these requests on. A step that does not return and steps that return with nothing are the same;
- loading weights and scoring are counted by themselves; a suspended engine, one without requests, and one whose
  requests wait for a later version are at nothing.

The thread that runs the engine says what it is at; the event loop beside it reads that, and so says it even of a step
that never ends. A loop that hangs itself is missed by its heartbeat.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

Activity = Literal["nothing", "steps", "loading", "scoring"]

PROGRESS_TIMEOUT_S = 90.0
"""For a token. A first step that compiles kernels, or takes a prompt of 32,000 tokens (half a minute for 32 billion
parameters on an H20), has to fit in; a request must have time to be answered elsewhere within the 120 s of
``rollout.turn_timeout_s``."""
LOADING_TIMEOUT_S = 300.0
SCORING_TIMEOUT_S = 120.0


class Effort(msgspec.Struct, frozen=True):
    """What an engine is at, and for how long it has had nothing to show for it."""

    at: Activity = "nothing"
    fruitless_s: float = 0.0


class ProgressMeter:
    """See the module docstring."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._at: Activity = "nothing"
        self._since = clock()
        self._before_s = 0.0  # of fruitless steps, before something else came in between

    def at(self, activity: Activity) -> None:
        """From now on the engine is at this."""
        with self._lock:
            if activity != self._at:
                now = self._clock()
                if self._at == "steps":
                    self._before_s += now - self._since
                self._at, self._since = activity, now

    def progressed(self) -> None:
        """A step has computed something."""
        with self._lock:
            self._since, self._before_s = self._clock(), 0.0

    def rest(self) -> None:
        """Nothing is left to be computed."""
        with self._lock:
            self._at, self._before_s = "nothing", 0.0

    def read(self) -> Effort:
        with self._lock:
            if self._at == "nothing":
                return Effort()
            earlier_s = self._before_s if self._at == "steps" else 0.0
            return Effort(self._at, earlier_s + self._clock() - self._since)


class Patience:
    """How long an engine may be at something."""

    def __init__(self, progress_timeout_s: float = PROGRESS_TIMEOUT_S) -> None:
        self._limits: Mapping[Activity, tuple[float, str]] = {
            "steps": (progress_timeout_s, f"no token for {{}}, rollout.progress_timeout_s={progress_timeout_s:g}"),
            "loading": (LOADING_TIMEOUT_S, f"weights are being loaded for {{}}, at most {LOADING_TIMEOUT_S:g} s"),
            "scoring": (SCORING_TIMEOUT_S, f"a sequence is being scored for {{}}, at most {SCORING_TIMEOUT_S:g} s"),
        }

    def verdict(self, effort: Effort, requests: int) -> str:
        """Why an engine with so many requests is to be given up; nothing where it is not."""
        limit_s, words = self._limits.get(effort.at, (float("inf"), ""))
        if effort.fruitless_s <= limit_s:
            return ""
        return f"it hangs: {words.format(f'{effort.fruitless_s:.1f} s')}; {requests} requests wait"
