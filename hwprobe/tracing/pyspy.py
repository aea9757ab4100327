"""Python stacks, by py-spy (https://github.com/benfred/py-spy), one for each Python process.

Invariant: the traced processes are never stopped for a sample (``--nonblocking``), so a stack may be torn; py-spy
counts those as errors, and they are not in the result. A process that cannot be read is a note, the
others are still told.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hwprobe.tracing.children import Child, ChildFailed, Interruption, last_line
from hwprobe.tracing.folded import fold, from_text
from hwprobe.tracing.kernel import Kernel
from hwprobe.tracing.looks import Looks
from hwprobe.tracing.order import Order, Site, finished, gather
from hwprobe.tracing.report import Report
from hwprobe.tracing.tables import cpu_rows
from hwprobe.tracing.threads import read_thread

SAMPLES_HZ = 50
MOST_PROCESSES = 32
START_S, FLUSH_S = 60.0, 60.0
SAMPLING = "Sampling process"
"""What py-spy says when it has found its way into a process."""


def stacks(order: Order, site: Site, kernel: Kernel, interruption: Interruption) -> Report:
    """On-CPU stacks with Python frames. Raises ``ChildFailed`` where no process is Python's or can be read."""
    pids = site.targets.look()
    wanted = [pid for pid in pids if is_python(pid, site.proc)]
    if not wanted:
        raise ChildFailed("none of the processes is a Python interpreter")
    notes = []
    if len(wanted) < len(pids):
        notes.append(f"{len(pids) - len(wanted)} processes are not Python's: they are not in the stacks")
    if len(wanted) > MOST_PROCESSES:
        notes.append(f"{len(wanted)} Python processes, the first {MOST_PROCESSES} are in the stacks")
        wanted = wanted[:MOST_PROCESSES]
    looks = Looks(site.targets, proc=site.proc)
    folded: Counter[str] = Counter()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trace-")))
        children = [(pid, stack.enter_context(_start(kernel, pid, order, folder))) for pid in wanted]
        for _, child in children:
            child.wait_for(SAMPLING, START_S, interruption)
        gathered = gather(
            order,
            site,
            "py-spy",
            looks,
            interruption,
            rate_hz=1.0,
            over=lambda: all(child.ended for _, child in children),
        )
        for pid, child in children:
            child.finish(FLUSH_S)
            taken = _read(child, folder / f"{pid}.folded")
            notes += [f"process {pid}: {reason}" for reason in taken[1]]
            folded.update(_named(pid, taken[0], site))
    if not folded and notes:
        raise ChildFailed("; ".join(notes))
    return finished(
        order,
        "py-spy",
        gathered,
        looks,
        entries=cpu_rows(looks.spans()),
        unit="samples",
        folded=dict(folded),
        notes=tuple(notes),
    )


def is_python(pid: int, proc: Path) -> bool:
    """Whether a process runs Python, or has it loaded."""
    try:
        if re.match(r"python[0-9.]*$", Path(os.readlink(proc / str(pid) / "exe")).name):
            return True
        return "/libpython" in (proc / str(pid) / "maps").read_text(errors="replace")
    except OSError:
        return False


def _start(kernel: Kernel, pid: int, order: Order, folder: Path) -> Child:
    command: Sequence[str] = (
        kernel.py_spy,
        "record",
        "--nonblocking",
        "--threads",
        "--format=raw",
        f"--rate={SAMPLES_HZ}",
        f"--duration={int(order.seconds + START_S + FLUSH_S)}",  # should its tracer be gone
        f"--output={folder / f'{pid}.folded'}",
        f"--pid={pid}",
    )
    return Child(command)


def _read(child: Child, path: Path) -> tuple[dict[str, int], list[str]]:
    """Stacks, and what went wrong."""
    if not path.exists():
        return {}, [f"py-spy: {last_line(child.complaints)}"]
    errors = re.search(r"Errors: (\d+)", child.output + child.complaints)
    notes = [f"{errors[1]} samples could not be read"] if errors and errors[1] != "0" else []
    return from_text(path.read_text(errors="replace")), notes


def _named(pid: int, stacks: dict[str, int], site: Site) -> dict[str, int]:
    """Each stack below its process."""
    facts = read_thread(pid, pid, site.proc)
    name = f"{facts.name if facts is not None else 'process'} {pid}"
    return {fold((name, *stack.split(";"))): weight for stack, weight in stacks.items()}
