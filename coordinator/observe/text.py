"""How numbers, losses and trends read, the same wherever a person meets them.

Invariant: a number that is not finite reads as ``-``, never as a wrong number and never as an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from coordinator.observe.records import EvalRecord, ImitationRecord, SampleRecord, StepRecord

BARS = "▁▂▃▄▅▆▇█"
FLAT = 0.005
"""A trend that moved by less than this between two steps is neither rising nor falling."""


def number(value: float, digits: int = 2) -> str:
    """Fixed digits while that is readable (``0.42``), three significant ones beyond (``1.3e-05``, ``1.84e+06``)."""
    if not math.isfinite(value):
        return "-"
    if value and (abs(value) < 0.5 * 10**-digits or abs(value) >= 1e6):
        return f"{value:.3g}"
    return f"{value:.{digits}f}"


def whole(value: float) -> str:
    """Rounded to an integer."""
    return f"{value:.0f}" if math.isfinite(value) else "-"


def count(value: int) -> str:
    """``26,880``, and ``1.34M`` beyond a million."""
    if value < 1_000_000:
        return f"{value:,}"
    return f"{value / 1e6:.2f}M" if value < 1_000_000_000 else f"{value / 1e9:.2f}G"


def percent(fraction: float) -> str:
    """``42%``; 100% and 0% only where it is all or nothing."""
    if not math.isfinite(fraction):
        return "-"
    rounded = round(100 * fraction)
    if 0 < fraction < 1:
        rounded = min(99, max(1, rounded))
    return f"{rounded}%"


def duration(seconds: float) -> str:
    """``0:38``, ``12:05``, ``3:00:09``."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def lost(reasons: Mapping[str, int]) -> str:
    """``3 (stale 2, env_failed 1)``, most frequent first; ``0`` where nothing was lost."""
    named = sorted(
        ((count, reason) for reason, count in reasons.items() if count), key=lambda item: (-item[0], item[1])
    )
    total = sum(count for count, _ in named)
    return f"{total} ({', '.join(f'{reason} {count}' for count, reason in named)})" if named else "0"


def arrow(previous: float | None, now: float) -> str:
    """``^`` rising, ``v`` falling, ``=`` neither."""
    if previous is None or not (math.isfinite(previous) and math.isfinite(now)) or abs(now - previous) < FLAT:
        return "="
    return "^" if now > previous else "v"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The newest values as bars between the least and the greatest of them; a gap where one is not finite."""
    shown = list(values)[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return " " * len(shown)
    low, high = min(finite), max(finite)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] if math.isfinite(value) else " " for value in shown)


def seconds_left(records: Sequence[StepRecord], total: int, window: int = 20) -> float:
    """Estimated time to the last step from the pace of the newest ones; NaN while that is not known."""
    recent = records[-window - 1 :]
    if len(recent) < 2 or recent[-1].step <= recent[0].step:
        return math.nan
    pace = (recent[-1].elapsed_s - recent[0].elapsed_s) / (recent[-1].step - recent[0].step)
    return max(0.0, pace * (total - recent[-1].step))


def step_line(records: Sequence[StepRecord], total: int) -> str:
    """The newest step on one line."""
    now = records[-1]
    before = records[-2].reward_trend if len(records) > 1 else None
    left = seconds_left(records, total)
    parts = [
        f"step {now.step}/{total}",
        f"v{now.version}",
        f"reward {number(now.reward_mean)} {arrow(before, now.reward_trend)}",
        f"success {percent(now.success_rate)}",
        f"{whole(now.tokens_per_s)} tok/s",
        f"stale {number(now.staleness_mean, 1)}",
        f"in flight {now.in_flight}",
        f"lost {lost(now.lost)}",
    ]
    return "  ".join(parts + ([f"eta {duration(left)}"] if math.isfinite(left) else []))


def evaluation_line(record: EvalRecord) -> str:
    """One evaluation on one line."""
    return (
        f"evaluation v{record.version}  success {percent(record.success)} of {record.episodes}"
        f"  return {number(record.return_mean)}  turns {number(record.turns_mean, 1)}{named(record.environment)}"
    )


def imitation_line(record: ImitationRecord, total: int, left_s: float) -> str:
    """One step of imitation on one line; ``left_s`` is NaN where it is not known how long the rest takes."""
    measured = [f"held-out {number(record.held_out_loss, 4)}"] if math.isfinite(record.held_out_loss) else []
    if not record.step:
        return "  ".join(["before the first step", *measured])
    parts = [
        f"step {record.step}/{total}",
        f"epoch {record.epoch}",
        f"loss {number(record.loss, 4)}",
        *measured,
        f"grad norm {number(record.grad_norm)}",
        f"{whole(record.tokens_per_s)} tok/s",
    ]
    return "  ".join(parts + ([f"eta {duration(left_s)}"] if left_s > 0 else []))


def named(means: dict[str, float]) -> str:
    """``  tool calls 0.62``: an environment's own metrics, each behind two blanks."""
    return "".join(f"  {name.replace('_', ' ')} {number(mean)}" for name, mean in sorted(means.items()))


def sample_text(sample: SampleRecord) -> str:
    """The trajectory as a person reads it."""
    outcome = "success" if sample.success else "no success"
    parts = [
        f"trajectory {sample.ticket}  version {sample.version}  reward {number(sample.reward)}  {outcome}",
        *(f"--- {speaker} ---\n{text.rstrip()}" for speaker, text in sample.transcript),
    ]
    return readable("\n\n".join(parts)) + "\n"


def readable(text: str) -> str:
    """Text from a policy or an environment without what would act on a terminal or break a page: colours are left
    out, other control characters and lone surrogates are shown as escapes."""
    return _UNREADABLE.sub(lambda found: ascii(found.group())[1:-1], _ANSI.sub("", text))


_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_UNREADABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
