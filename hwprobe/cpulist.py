"""The kernel's list format for CPU numbers (``0-3,8``), kept as text because it stays short on large hosts.

Invariant: ``format_cpulist(parse_cpulist(text))`` is the shortest spelling of the same set, in rising order.
Format: Documentation/admin-guide/cputopology.rst and ``man 7 cpuset`` ("List format").
"""

from __future__ import annotations

from collections.abc import Iterable


def parse_cpulist(text: str) -> tuple[int, ...]:
    """CPU numbers in rising order; empty text is no CPU. Raises ``ValueError`` naming the text."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if not part:
            continue
        first, _, last = part.partition("-")
        try:
            low, high = int(first), int(last or first)
        except ValueError:
            raise ValueError(f"expected a CPU list such as 0-3,8, found {text!r}") from None
        if low > high:
            raise ValueError(f"expected a CPU list such as 0-3,8, found the range {part!r} in {text!r}")
        numbers.update(range(low, high + 1))
    return tuple(sorted(numbers))


def format_cpulist(numbers: Iterable[int]) -> str:
    """The shortest list of ranges that names exactly these numbers."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in ranges)
