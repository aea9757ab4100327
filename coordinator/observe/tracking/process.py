"""The process of one tracker: ``python -m coordinator.observe.tracking.process NAME``, started by ``RemoteTracker``.

Invariant: it dies with the run's process; what its library prints goes to its log, and what its library asks for at a
terminal it does not get. The first error is answered and ends it: half a curve is worse than none, and all of it is in
``metrics.jsonl``.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import BinaryIO

import msgspec

from coordinator.observe.tracking.protocol import Answer, Backend, End, Log, Sitting

BACKENDS = {
    "wandb": "coordinator.observe.tracking.wandb_run:WandbRun",
    "mlflow": "coordinator.observe.tracking.mlflow_run:MlflowRun",
    "trackio": "coordinator.observe.tracking.trackio_run:TrackioRun",
}

MOST_ERROR = 500


def main(name: str) -> int:
    with _taken_input() as orders, _taken_output() as answers:
        return serve(name, orders, answers)


def _taken_input() -> BinaryIO:
    """Standard input for ourselves; the library gets nothing to read."""
    file = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return file


def _taken_output() -> BinaryIO:
    """Standard output for ourselves; the library gets our log to write to."""
    file = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return file


def serve(name: str, orders: BinaryIO, answers: BinaryIO) -> int:
    """Until the end was told, or something failed; the exit status."""

    def done(work: Callable[[], object]) -> bool:
        answer = Answer()
        try:
            work()
        except Exception as error:  # whatever a library raises costs the run this tracker, and no more
            traceback.print_exc()
            answer = Answer(f"{type(error).__name__}: {' '.join(str(error).split())}"[:MOST_ERROR])
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()
        return not answer.error

    backends: list[Backend] = []
    first = orders.readline()
    if not first or not done(lambda: backends.append(backend(name, msgspec.json.decode(first, type=Sitting)))):
        return 1
    decoder = msgspec.json.Decoder(Log | End)
    for line in orders:
        order = decoder.decode(line)
        if isinstance(order, End):
            return 0 if done(partial(backends[0].finish, order.outcome)) else 1
        if not done(partial(backends[0].log, order.values, order.version)):
            return 1
    return 1


def backend(name: str, sitting: Sitting) -> Backend:
    """The tracker of this name (or ``module:Class``), begun. Raises whatever its library raises."""
    module, _, kind = BACKENDS.get(name, name).partition(":")
    made: Backend = getattr(importlib.import_module(module), kind)(sitting)
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
