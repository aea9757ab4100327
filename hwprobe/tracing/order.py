"""What a tool is asked to do, and what all ways of doing it share.

Invariant: whoever waits is told when the watching begins, which is not when the command does: BPF has to be compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hwprobe.tracing.children import Interruption
from hwprobe.tracing.folded import fold
from hwprobe.tracing.looks import Gathered, Looks
from hwprobe.tracing.report import How, Report, Tool
from hwprobe.tracing.tables import runqueue_rows
from hwprobe.tracing.targets import Targets


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One trace."""

    tool: Tool
    seconds: float = 10.0
    how: How | None = None  # None: the best that works
    rate_hz: float = 20.0  # looks a second, where looks are what there is
    threshold_ms: float = 10.0  # a call that takes as long is slow
    children: bool = True  # follow what the processes start


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """Where it is done."""

    targets: Targets
    proc: Path = Path("/proc")
    say: Callable[[str], None] = lambda line: None  # what happens meanwhile


def gather(
    order: Order,
    site: Site,
    how: How,
    looks: Looks,
    interruption: Interruption,
    *,
    rate_hz: float,
    over: Callable[[], bool] = lambda: False,
    after: Callable[[], None] = lambda: None,
) -> Gathered:
    """Watch for as long as was ordered; see ``Looks.gather``."""
    site.say(f"{order.tool} by {how}: watching {len(looks.processes)} processes for {order.seconds:g} s")
    return looks.gather(order.seconds, rate_hz, interruption, over=over, after=after)


def finished(order: Order, how: How, gathered: Gathered, looks: Looks, **found: Any) -> Report:
    """The report of one way; ``found`` are further fields of it. Stacks without weight are left out."""
    notes = (*found.pop("notes", ()), *gathered.notes())
    folded = {stack: weight for stack, weight in found.pop("folded", {}).items() if weight}
    return Report(
        tool=order.tool,
        how=how,
        seconds=round(gathered.seconds, 3),
        processes=len(looks.processes),
        threads=len(looks.spans()),
        interrupted=gathered.interrupted,
        folded=folded,
        notes=tuple(dict.fromkeys(notes)),
        **found,
    )


def queued(
    order: Order, how: How, gathered: Gathered, looks: Looks, longest_us: Mapping[int, int] | None = None, **found: Any
) -> Report:
    """That of ``runqueue``: how long each thread waited for a CPU, by the kernel's counters, and at most, if known."""
    spans = looks.spans()
    return finished(
        order,
        how,
        gathered,
        looks,
        entries=runqueue_rows(spans, longest_us),
        unit="us",
        folded={fold((span.facts.name, f"thread {span.facts.tid}")): span.wait_ns // 1000 for span in spans},
        **found,
    )
