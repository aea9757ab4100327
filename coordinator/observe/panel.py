"""The panel that a run keeps at the bottom of a terminal, drawn with rich.

Invariant: the screen's state is only what the records said; drawing happens in rich's refresh thread, which reads
one attribute at a time, each replaced as a whole and never changed in place. Lines that others print while the
panel is up scroll by above it.
"""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from rich.box import ROUNDED
from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coordinator.observe.progress import INTERRUPTED, summary
from coordinator.observe.records import EvalRecord, StepRecord
from coordinator.observe.text import (
    arrow,
    duration,
    evaluation_line,
    lost,
    number,
    percent,
    readable,
    seconds_left,
    sparkline,
    whole,
)

HISTORY = 60
ARROWS = {"^": "↑", "v": "↓", "=": "→"}


class LiveProgress:
    """See ``coordinator.observe.progress.Progress``."""

    def __init__(
        self, name: str, total_steps: int, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._total = total_steps
        self._clock = clock
        self._records: tuple[StepRecord, ...] = ()
        self._evaluations: tuple[EvalRecord, ...] = ()
        self._best: EvalRecord | None = None
        self._phases: tuple[tuple[str, float], ...] = ()
        self._stepped_at = clock()
        self._stopping = False
        self._finished = False
        self.console = Console(file=stream, highlight=False)
        self._live = Live(console=self.console, get_renderable=self.render, refresh_per_second=5, transient=True)
        self._live.start()
        atexit.register(self.close)  # a process that ends without a last word still gives the cursor back

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        entry = (text, self._clock())
        self._phases = (*self._phases, entry)
        try:
            yield
        except BaseException as error:
            self._end_phase(entry, f"[red]failed after {self._clock() - entry[1]:.1f} s ({type(error).__name__})[/]")
            raise
        self._end_phase(entry, f"[dim]{self._clock() - entry[1]:.1f} s[/]")

    def step(self, record: StepRecord) -> None:
        self._records = (*self._records[-HISTORY:], record)
        self._stepped_at = self._clock()

    def evaluation(self, record: EvalRecord) -> None:
        self._evaluations = (*self._evaluations[-HISTORY:], record)
        if self._best is None or record.success >= self._best.success:
            self._best = record
        self._print(f"[cyan]{evaluation_line(record)}[/]")

    def note(self, text: str) -> None:
        self._print(escape(readable(text)))

    def warn(self, text: str) -> None:
        self._print(f"[yellow]warning:[/] {escape(readable(text))}")

    def interrupted(self, text: str = INTERRUPTED) -> None:
        self._stopping = True
        self._print(f"[bold yellow]{escape(text)}[/]")

    def finish(self, outcome: str, places: Mapping[str, str]) -> None:
        if self._finished:
            return
        self.close()
        if self._records:
            self.console.print(self.render())
        self._print(f"[bold]{escape(summary(outcome, places))}[/]")

    def close(self) -> None:
        self._finished = True
        self._live.stop()
        atexit.unregister(self.close)

    def render(self) -> RenderableType:
        """The panel as it is now."""
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(style="dim", no_wrap=True, width=10)
        table.add_column(overflow="fold", ratio=1)
        for label, content in self._rows():
            table.add_row(label, content)
        state = (
            "[bold yellow]stopping[/]" if self._stopping else f"v{self._records[-1].version if self._records else 0}"
        )
        title = f"[bold]{escape(self._name)}[/] {state}"
        return Panel(table, title=title, title_align="left", box=ROUNDED, border_style="dim", width=self._width())

    def _rows(self) -> Iterator[tuple[str, RenderableType]]:
        records = self._records
        yield "step", self._step_row(records[-1].step if records else 0)
        if records:
            yield from self._metric_rows(records)
        if not self._finished:
            for text, started in self._phases:
                yield "now", Text(f"{text} ... {self._clock() - started:.0f} s")

    def _step_row(self, step: int) -> RenderableType:
        row = Table.grid(padding=(0, 1))
        row.add_row(f"{step}/{self._total}", ProgressBar(total=self._total, completed=step, width=24), self._times())
        return row

    def _times(self) -> str:
        if not self._records:
            return ""
        since = 0.0 if self._finished else self._clock() - self._stepped_at
        left = seconds_left(self._records, self._total) - since
        eta = "" if self._finished or not math.isfinite(left) else f" · eta {duration(left)}"
        return f"[dim]{duration(self._records[-1].elapsed_s + since)}{eta}[/]"

    def _metric_rows(self, records: tuple[StepRecord, ...]) -> Iterator[tuple[str, RenderableType]]:
        now = records[-1]
        before = records[-2].reward_trend if len(records) > 1 else None
        trend = ARROWS[arrow(before, now.reward_trend)]
        rewards = sparkline([record.reward_mean for record in records])
        successes = sparkline([record.success_rate for record in records])
        yield "reward", f"{number(now.reward_mean):>6} {trend} [green]{rewards}[/]"
        yield "success", f"{percent(now.success_rate):>6}   [green]{successes}[/]"
        if self._evaluations and self._best:
            last = self._evaluations[-1]
            best = f"[dim]v{last.version} · best {percent(self._best.success)} v{self._best.version}[/]"
            yield "evaluation", f"[cyan]{percent(last.success):>6}[/]   {best}"
        phases = " · ".join(f"{phase} {seconds:.1f} s" for phase, seconds in now.seconds.items())
        yield "speed", f"{whole(now.tokens_per_s):>6}   tokens/s [dim]{escape(phases)}[/]"
        yield "staleness", f"{number(now.staleness_mean, 1):>6}   [dim]at most[/] {now.staleness_max}"
        yield "in flight", f"{now.in_flight:>6}   [dim]buffered[/] {now.buffered}"
        total, _, reasons = lost(now.lost).partition(" ")
        yield "lost", f"{total:>6}   [dim]{escape(reasons.strip('()'))}[/]"

    def _width(self) -> int:
        return min(self.console.width, 100)

    def _end_phase(self, entry: tuple[str, float], ending: str) -> None:
        self._phases = tuple(phase for phase in self._phases if phase is not entry)
        self._print(f"{escape(entry[0])} ... {ending}")

    def _print(self, markup: str) -> None:
        self.console.print(markup, soft_wrap=True)
