"""What a run writes down while it goes: metrics, progress, samples, the timeline and the report.

Invariant: recording never stops a run silently and never fails it: a record that cannot be written is reported once.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from actors.env.messages import Outcome
from actors.telemetry import SpansTaken
from coordinator.observe.lines import LineWriter, read_lines
from coordinator.observe.progress import Progress
from coordinator.observe.records import (
    EvalRecord,
    ImitationRecord,
    SampleRecord,
    StepRecord,
    decode_metric,
    moving_average,
)
from coordinator.observe.reporting import ReportWriter
from coordinator.observe.rundir import RunDirectory
from coordinator.observe.text import imitation_line
from coordinator.observe.trackers import open_trackers

SAMPLES_PER_STEP = 1
REPORT_EVERY_S = 20.0
RATE_STEPS = 5
"""Steps over which sampled tokens are counted: generation comes in bursts between two batches."""


class Sampled(NamedTuple):
    """How much the engines had sampled at some time."""

    tokens: int  # by all of them, in this sitting
    at: float  # time.monotonic()


class StepFacts:
    """What the pipeline knows of a step."""

    def __init__(
        self,
        *,
        version: int,
        outcomes: Sequence[Outcome],
        statistics: dict[str, float],
        seconds: dict[str, float],
        in_flight: int,
        buffered: int,
        lost: dict[str, int],
        sampled: Sampled,
    ) -> None:
        self.version = version
        self.outcomes = outcomes
        self.statistics = statistics
        self.seconds = seconds
        self.in_flight = in_flight
        self.buffered = buffered
        self.lost = lost
        self.sampled = sampled


def _rate(earlier: Sampled, later: Sampled) -> float:
    return (later.tokens - earlier.tokens) / max(later.at - earlier.at, 1e-9)


class Recorder:
    """See the module docstring."""

    def __init__(
        self, run: RunDirectory, progress: Progress, *, resumed_version: int | None, elapsed_s: float | None
    ) -> None:
        """``elapsed_s``: how long the sittings before this one took (None: as their last step says); their trend goes
        on from what they recorded."""
        self.progress = progress
        self._run = run
        self._trackers = open_trackers(run, progress.warn, resumed_version=resumed_version)
        self._timeline = LineWriter(run.timeline)
        last = _last_step(run) if resumed_version is not None else None
        self._trend = None if last is None else last.reward_trend
        before_s = (0.0 if last is None else last.elapsed_s) if elapsed_s is None else elapsed_s
        self._started = time.monotonic() - before_s
        self._sampled = deque([Sampled(0, time.monotonic())], maxlen=RATE_STEPS)
        self._report = ReportWriter(run)
        self._last_report = time.monotonic()
        self._missing: set[str] = set()  # kinds of records that could not be written
        self._pace_from: tuple[int, float] | None = None  # step and time of the first step of imitation in this sitting

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def best_success(self) -> float | None:
        """Of the evaluations on record, after the first step."""
        return max((record.success for record in self.evaluations() if record.version > 0), default=None)

    def evaluated(self) -> int:
        """The newest version with an evaluation on record; -1 if there is none."""
        return max((record.version for record in self.evaluations()), default=-1)

    def evaluations(self) -> list[EvalRecord]:
        records = read_lines(self._run.metrics, decode_metric).records
        return [record for record in records if isinstance(record, EvalRecord)]

    def generation_starts(self) -> None:
        """Rates count from here: nobody generates while the parts are started."""
        self._sampled = deque([Sampled(self._sampled[-1].tokens, time.monotonic())], maxlen=RATE_STEPS)

    def step(self, facts: StepFacts) -> StepRecord:
        """Record one step."""
        rewards = np.array([outcome.reward for outcome in facts.outcomes])
        staleness = np.array([facts.version - 1 - outcome.initiating_version for outcome in facts.outcomes])
        self._trend = moving_average(self._trend, float(rewards.mean()))
        statistics = facts.statistics
        record = StepRecord(
            step=facts.version,
            version=facts.version,
            elapsed_s=self.elapsed_s,
            reward_mean=float(rewards.mean()),
            reward_std=float(rewards.std()),
            reward_min=float(rewards.min()),
            reward_max=float(rewards.max()),
            reward_trend=self._trend,
            success_rate=float(np.mean([outcome.success for outcome in facts.outcomes])),
            trajectories=len(facts.outcomes),
            tokens=sum(outcome.sampled_tokens for outcome in facts.outcomes),
            tokens_per_s=_rate(self._sampled[0], facts.sampled),
            staleness_mean=float(staleness.mean()),
            staleness_max=int(staleness.max()),
            in_flight=facts.in_flight,
            buffered=facts.buffered,
            lost=facts.lost,
            loss=statistics.get("loss", float("nan")),
            grad_norm=statistics.get("grad_norm", float("nan")),
            entropy=statistics.get("entropy", float("nan")),
            ratio_mean=statistics.get("ratio_mean", float("nan")),
            kl_rollout=statistics.get("kl_rollout", float("nan")),
            seconds=facts.seconds,
            turns_mean=float(np.mean([outcome.turns for outcome in facts.outcomes])),
            environment=mean_metrics(facts.outcomes),
            kl_reference=statistics.get("kl_reference", 0.0),
            clipped_fraction=statistics.get("clipped_fraction", 0.0),
            truncated_fraction=statistics.get("truncated_fraction", 0.0),
            recomputed_fraction=statistics.get("recomputed_fraction", 0.0),
            kl_engine=statistics.get("kl_engine", 0.0),
            value_loss=statistics.get("value_loss", 0.0),
            clip_norm=statistics.get("clip_norm", 0.0),
            explained_variance=statistics.get("explained_variance", 0.0),
        )
        self._sampled.append(facts.sampled)
        for tracker in self._trackers:
            self._keep("metrics", partial(tracker.log_step, record))
        self.progress.step(record)
        for outcome in sorted(facts.outcomes, key=lambda outcome: -outcome.reward)[:SAMPLES_PER_STEP]:
            self.sample(outcome)
        self._report_now_and_then()
        return record

    def imitation(self, record: ImitationRecord, total: int) -> None:
        """Record one step of imitation, of ``total``."""
        for tracker in self._trackers:
            self._keep("metrics", partial(tracker.log_imitation, record))
        if self._pace_from is None:
            self._pace_from = (record.step, record.elapsed_s)
        step, at = self._pace_from
        pace = (record.elapsed_s - at) / (record.step - step) if record.step > step else math.nan
        self.progress.note(imitation_line(record, total, pace * (total - record.step)))
        self._report_now_and_then()

    def _report_now_and_then(self) -> None:
        now = time.monotonic()
        if now - self._last_report > REPORT_EVERY_S:
            self._last_report = now
            self._keep("report", self._report.refresh)

    def sample(self, outcome: Outcome) -> None:
        """Keep a trajectory for people to read."""
        sample = SampleRecord(
            ticket=outcome.ticket,
            version=outcome.initiating_version,
            reward=outcome.reward,
            success=outcome.success,
            transcript=outcome.transcript,
        )
        self._keep("samples", lambda: self._run.add_sample(sample))

    def evaluation(self, record: EvalRecord) -> None:
        """Record one evaluation."""
        for tracker in self._trackers:
            self._keep("metrics", partial(tracker.log_evaluation, record))
        self.progress.evaluation(record)

    def spans(self, message: SpansTaken) -> None:
        """Keep spans for the timeline."""
        self._keep("timeline", lambda: self._timeline.write_all(message.spans))

    def close(self, status: str) -> None:
        """Write the last report; nothing is recorded afterwards."""
        for tracker in self._trackers:  # all of them at once, before any is waited for
            tracker.end(status)
        for tracker in self._trackers:
            self._keep("metrics", tracker.close)
        self._keep("timeline", self._timeline.close)
        self._keep("report", partial(self._report.finish, status))

    def _keep(self, what: str, write: Callable[[], object]) -> None:
        """Write something that a run can do without, as on a full disk."""
        try:
            write()
        except OSError as error:
            if what not in self._missing:
                self._missing.add(what)
                self.progress.warn(f"{what} cannot be written, and will have gaps: {error}")


def evaluation_record(version: int, outcomes: Sequence[Outcome]) -> EvalRecord:
    """Episodes that were lost count as failures."""
    return EvalRecord(
        version=version,
        episodes=len(outcomes),
        success=float(np.mean([outcome.success for outcome in outcomes])),
        return_mean=float(np.mean([outcome.env_return for outcome in outcomes])),
        turns_mean=float(np.mean([outcome.turns for outcome in outcomes])),
        environment=mean_metrics(outcomes),
    )


def mean_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Each of the environment's own metrics, averaged over all episodes: where one does not tell it, it is 0."""
    names = sorted({name for outcome in outcomes for name in outcome.metrics})
    return {name: sum(outcome.metrics.get(name, 0.0) for outcome in outcomes) / len(outcomes) for name in names}


def _last_step(run: RunDirectory) -> StepRecord | None:
    """The one on record."""
    steps = [record for record in read_lines(run.metrics, decode_metric).records if isinstance(record, StepRecord)]
    return steps[-1] if steps else None
