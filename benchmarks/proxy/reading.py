"""What a part of ``benchmarks.proxy`` returns."""

from __future__ import annotations

import msgspec


class Reading(msgspec.Struct, frozen=True):
    """One part's result."""

    figures: dict[str, float]
    rows: list[str]  # a table, its head first: for people


class NotMeasurable(RuntimeError):
    """What a part needs is not here; the message names it and says how it comes."""
