"""Folded stacks: frames from the outermost inwards, joined by ``;``, and a weight.

Invariant: a frame holds neither ``;`` nor a line break, so that the text form (``a;b;c 12``, one stack a line) can be
read back, by other programs too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

ASLEEP = "(asleep throughout)"
"""A frame below those of threads that never got a CPU while they were watched: many, and nobody waits for them."""


def fold(frames: Iterable[str]) -> str:
    """One stack."""
    return ";".join(_clean(frame) for frame in frames if frame) or "(nothing)"


def _clean(frame: str) -> str:
    return " ".join(frame.replace(";", ":").split())


def to_text(stacks: Mapping[str, int]) -> str:
    """The largest first."""
    return "".join(f"{stack} {weight}\n" for stack, weight in ordered(stacks))


def from_text(text: str) -> dict[str, int]:
    """Stacks that occur twice are added up; a line without a weight raises ``ValueError``."""
    stacks: Counter[str] = Counter()
    for line in text.splitlines():
        if line.strip():
            stack, _, weight = line.rpartition(" ")
            if not stack or not weight.isdecimal():
                raise ValueError(f"expected 'frame;frame;frame 12', found {line[:80]!r}")
            stacks[stack] += int(weight)
    return dict(stacks)


def ordered(stacks: Mapping[str, int]) -> list[tuple[str, int]]:
    """The largest first, but those of threads that did nothing at all after the others."""
    return sorted(stacks.items(), key=lambda item: (ASLEEP in item[0], -item[1], item[0]))


def innermost(stack: str, frames: int, letters: int) -> str:
    """For a table: who, and so many of a stack's last frames, fewer where they are longer than ``letters``."""
    first, *rest = stack.split(";")
    kept: Sequence[str] = rest[-frames:]
    while len(kept) > 1 and len(" > ".join(kept)) > letters:
        kept = kept[1:]
    return " > ".join((first, *(("..",) if len(kept) < len(rest) else ()), *kept))
