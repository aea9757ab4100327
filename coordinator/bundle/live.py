"""What a run that still answers says of itself, for the bundle.

Invariant: nothing that hangs keeps the rest from being collected; each question has its deadline, and one that was not
answered is in the bundle as what it said instead.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import msgspec

from coordinator.bundle.files import Collected
from coordinator.bundle.redaction import Redactor
from coordinator.desk.messages import FetchFiles
from coordinator.shell import looks, orders
from coordinator.shell.connection import Connection, ShellError

AUDIT_LINES = "1000"
FILE_ITEM_S = 60.0

Question = Callable[[Connection], Awaitable[msgspec.Struct]]
QUESTIONS: dict[str, Question] = {
    "status": looks.status,
    "nodes": looks.nodes,
    "engines": looks.engines,
    "trajectories": looks.trajectories,
    "queues": looks.queues,
    "versions": looks.versions,
    "shards": looks.shards,
    "hardware": looks.hardware,
    "audit": lambda run: orders.audit(run, AUDIT_LINES),
}


async def live_files(run: Connection, redactor: Redactor) -> AsyncIterator[Collected]:
    """Every answer as JSON, and the metrics as Prometheus would read them; where the coordinator does not even answer
    the first, quickest question, nothing else is asked."""
    try:
        await looks.shards(run)
    except ShellError as error:
        yield Collected("live/silent.txt", f"{error}\n".encode(), "the run does not answer")
        return
    for name, question in QUESTIONS.items():
        try:
            answer = await question(run)
        except ShellError as error:
            yield Collected(f"live/{name}.json", b"", f"not answered: {error}")
            continue
        text, taken_out = redactor.clean(msgspec.json.format(msgspec.json.encode(answer)).decode())
        yield Collected(f"live/{name}.json", text.encode(), f"{taken_out} secrets left out" if taken_out else "")
    try:
        yield Collected("live/metrics.prom", (await looks.metrics(run)).text.encode())
    except ShellError as error:
        yield Collected("live/metrics.prom", b"", f"not answered: {error}")


async def fetched_files(run: Connection, redactor: Redactor) -> AsyncIterator[Collected]:
    """The files of a run whose directory is not here, as its coordinator collects them; raises ``ShellError``."""
    parts: list[bytes] = []
    async with aclosing(run.stream(FetchFiles(), item_s=FILE_ITEM_S)) as pieces:
        async for piece in pieces:
            parts.append(piece.data)
            if piece.last:
                text, _ = redactor.clean(b"".join(parts).decode("utf-8", "backslashreplace"))
                yield Collected(piece.name, text.encode(), piece.note)
                parts.clear()
