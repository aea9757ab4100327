"""Running a bpftrace program, and reading what it prints (``-f json``).

Invariant: ``record`` returns what the program counted between ``ready`` and its end, or raises ``ChildFailed`` with the
reason; events that the kernel could not deliver and keys that found no room are told as notes, never passed over.

The format: one JSON object a line; ``{"type": "map", "data": {"@name": {"key": value}}}`` (a map without keys has its
value in place of the object), ``hist`` likewise with a list of ``{"min": 0, "max": 1, "count": 2}``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from hwprobe.tracing.children import Child, ChildFailed, Interruption, last_line
from hwprobe.tracing.kernel import MOUNT, PRIVATE_TRACEFS, Kernel
from hwprobe.tracing.programs import READY
from hwprobe.tracing.report import Bucket

ATTACH_S = 120.0
"""To compile and attach: seconds on a machine that is busy."""

FLUSH_S = 120.0
"""To print: every address of a stack is looked up then."""

ENVIRON = {"BPFTRACE_MAP_KEYS_MAX": "65536", "BPFTRACE_MAX_MAP_KEYS": "65536"}  # old and new name
MOST_NOTES = 5


class Maps(msgspec.Struct, frozen=True):
    """What a program left behind."""

    counts: dict[str, dict[str, int]]  # of maps with keys
    values: dict[str, int]  # of those without
    stacks: dict[str, dict[str, str]]  # of maps whose values are text: stacks and names
    histograms: dict[str, tuple[Bucket, ...]]  # microseconds became milliseconds
    notes: tuple[str, ...] = ()

    def table(self, name: str) -> dict[str, int]:
        return self.counts.get(name, {})

    def texts(self, name: str) -> dict[str, str]:
        return self.stacks.get(name, {})


def record(text: str, kernel: Kernel, interruption: Interruption, gather: Callable[[Callable[[], bool]], None]) -> Maps:
    """Run a program; ``gather`` is called once it is attached, with what says that it has ended too early, and returns
    when enough was seen. Raises ``ChildFailed``."""
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        path = Path(folder) / "program.bt"
        path.write_text(text)
        command = ["bpftrace", "-B", "none", "-f", "json", str(path)]
        if kernel.mount:
            command = [*PRIVATE_TRACEFS, f'{MOUNT}exec "$@"', "sh", *command]
        with Child(command, ENVIRON) as child:
            child.name = "bpftrace"
            if not child.wait_for(READY, ATTACH_S, interruption) and not interruption.stopped:
                raise ChildFailed(f"bpftrace did not attach: {last_line(child.complaints)}")
            gather(lambda: child.ended)
            if child.ended:
                raise ChildFailed(f"bpftrace ended while it traced: {last_line(child.complaints)}")
            child.finish(FLUSH_S)
            if child.status:
                raise ChildFailed(f"bpftrace ended with status {child.status}: {last_line(child.complaints)}")
            return parse(child.output, child.complaints)


def parse(output: str, complaints: str = "") -> Maps:
    """Of a whole run."""
    maps = Maps({}, {}, {}, {})
    notes = _complaints(complaints)
    for line in output.splitlines():
        try:
            message = msgspec.json.decode(line)
        except msgspec.DecodeError:
            if line.strip():
                notes.append(f"bpftrace said something unreadable: {line.strip()[:80]}")
            continue
        if isinstance(message, dict):
            _take(maps, message, notes)
    return msgspec.structs.replace(maps, notes=tuple(dict.fromkeys(notes))[:MOST_NOTES])


def _take(maps: Maps, message: dict[str, Any], notes: list[str]) -> None:
    kind, data = message.get("type"), message.get("data")
    if kind == "lost_events" and isinstance(data, dict):
        notes.append(f"the kernel lost {data.get('events', 'some')} events: the figures are too low")
        return
    if kind not in ("map", "hist") or not isinstance(data, dict):
        return
    for name, content in data.items():
        if kind == "hist":
            maps.histograms[name] = tuple(_bucket(one) for one in content)
        elif not isinstance(content, dict):
            maps.values[name] = int(content)
        elif all(isinstance(value, str) for value in content.values()):
            maps.stacks[name] = dict(content)
        else:
            maps.counts[name] = {key: int(value) for key, value in content.items()}


def _bucket(one: dict[str, int]) -> Bucket:
    return Bucket(max(0, one.get("min", 0)) / 1000, one["count"])


def _complaints(text: str) -> list[str]:
    """What the figures suffer from."""
    found = []
    for line in text.splitlines():
        lowered = line.lower()
        if "lost" in lowered or "map full" in lowered or "no space" in lowered or "failed to" in lowered:
            found.append(f"bpftrace: {line.strip()}")
    return found


def frames(stack: str) -> tuple[str, ...]:
    """A stack as bpftrace prints it (innermost first, a line each, ``name+offset``), outermost first."""
    lines = [line.strip() for line in stack.splitlines() if line.strip()]
    return tuple(line.rpartition("+")[0] or line for line in reversed(lines))


def split_key(key: str, numbers: int) -> tuple[list[int], list[str]]:
    """The numbers that a key begins with, and the rest: a name, then stacks. Each stack begins on a line of its own;
    one without frames is nothing at all, so that commas meet."""
    *first, rest = key.split(",", numbers)
    name, *stacks = (rest + "\n" if rest.endswith("\n,") else rest).split(",\n")
    return [int(one) for one in first], [name.rstrip(","), *stacks]
