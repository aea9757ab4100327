"""The coordinator process among several: it stands, waits for its turn, leads, and steps aside.

    start-coordinator JOB.yaml                 stands for a new run, and so leads it at once
    start-coordinator --standby-of RUN         waits until whoever leads that run is gone, and then goes on with it

With the embedded store, which one process at a time may open, the kernel's lock on it is what a standby waits for: it
is free as soon as the leader's process is gone, but not while that one is merely stopped. With ZooKeeper a leader of
which the servers hear nothing for ``coordinator.session_s`` is succeeded, whatever ails it.

Invariant: a process whose term is over ends at once (exit status 75; 76 where it was told to step down), and leaves
everything as it is: to save, to report and to tell the roles is its successor's business.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from actors.core import Ref
from actors.core.logs import configure_logging
from coordinator.burial import bury
from coordinator.commands.train import read_as_written, read_job_directory
from coordinator.facts import Facts
from coordinator.gathering import Gathering
from coordinator.job import Job, convert
from coordinator.launch import CONTROL, Launch, open_node, policy_directory
from coordinator.launching.exits import DEPOSED, STEPPED_DOWN
from coordinator.leadership import Candidate, Deposed, Term
from coordinator.metadata import credentials, open_store
from coordinator.metadata.measured import Shard
from coordinator.metadata.protocol import MetadataStore, StoreError
from coordinator.observe.progress import Progress, open_progress
from coordinator.observe.rundir import RunDirectory
from coordinator.observe.trackers import load_ahead
from coordinator.pulse import pulse
from coordinator.resources.resolve import resolve
from coordinator.scheduling.succession import JournalReader
from coordinator.standbylock import standing
from coordinator.takeover import Led, gather_followers
from hwprobe import build_affinity_map, probe

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.25
"""Between two looks for a store that cannot be opened (yet)."""

READ_EVERY_S = 2.0
"""How often a standby reads what is new in the journal."""

OVER = ("done", "interrupted", "failed")
"""States in which a run has ended; see ``RunStatus``."""


def name_of_process() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def lead(launch: Launch, directory: RunDirectory) -> int:
    """Lead a new run to its end; returns the exit status."""
    configure_logging(CONTROL, directory.logs, job=directory.path.name)
    policy_directory(launch.job, directory.path)
    progress = open_progress(launch.job.name, launch.job.train.steps)
    progress.note(f"run directory: {directory.path}")
    return _to_the_end(_lead(launch, directory, progress))


def _to_the_end(leading: Coroutine[Any, Any, int]) -> int:
    try:
        return asyncio.run(leading)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # the exit status is settled
            signal.signal(number, signal.SIG_IGN)


async def _lead(launch: Launch, directory: RunDirectory, progress: Progress) -> int:
    shards: list[Shard] = []
    async with pulse(launch.host) as place:
        store = await _open(launch.job, directory.path, shards)
        term = await _candidate(launch, store, directory.path.name, place).lead()
        _leave_when_over(term, progress)
        return await Gathering(launch, directory, progress, Led(store, term, shards=shards)).run()


def _candidate(launch: Launch, store: MetadataStore, run: str, place: str) -> Candidate:
    session_s = launch.job.coordinator.session_s
    return Candidate(store, run, name_of_process(), session_timeout_s=session_s, pulse=place)


def stand_by(path: Path, *, host: str, port: int, key_file: Path | None) -> int:
    """Wait for a run's leader to be gone, and lead it to its end; returns the exit status."""
    reader = RunDirectory.open(path)
    job = convert(reader.read_job(), str(reader.job_file), [])
    affinity = build_affinity_map(probe())
    launch = Launch(
        job=job,
        placement=resolve(job, affinity, here=())[1],
        affinity=affinity,
        job_directory=read_job_directory(reader),
        local_roles=(),
        host=host,
        port=port,
        key_file=key_file,
        written=read_as_written(reader),
    )
    configure_logging(f"{CONTROL}-{os.getpid()}", reader.logs, job=reader.path.name)
    return _to_the_end(_stand_by(launch, reader))


async def _stand_by(launch: Launch, reader: RunDirectory) -> int:
    async with pulse(launch.host) as place:
        return await _stand_and_lead(launch, reader, place)


async def _stand_and_lead(launch: Launch, reader: RunDirectory, place: str) -> int:
    progress = open_progress(launch.job.name, launch.job.train.steps)
    load_ahead()
    progress.note(f"standing by to lead {reader.path.name} (store {launch.job.coordinator.store})")
    journal = JournalReader(reader.ledger)
    shards: list[Shard] = []
    reading = asyncio.create_task(_read_along(journal))
    try:
        with standing(reader.path):
            won = await _win(launch, reader, shards, place)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    if won is None:
        progress.note(f"{reader.path.name} has ended: there is nothing to lead")
        return 0
    store, term = won
    _leave_when_over(term, progress)
    progress.note(f"leading {reader.path.name} from now on, under epoch {term.epoch}")
    node = open_node(launch, term.epoch)
    leader = Ref(node.address, "coordinator")
    followers = await gather_followers(node, Facts(store, reader.path.name), leader)
    progress.note(f"{len(followers.nodes)} nodes follow")
    with RunDirectory.take_over(reader.path) as directory:
        led = Led(store, term, shards=shards, node=node, followers=followers, journal=journal)
        return await Gathering(launch, directory, progress, led).run()


async def _read_along(journal: JournalReader) -> None:
    while True:
        journal.catch_up()
        await asyncio.sleep(READ_EVERY_S)


async def _win(
    launch: Launch, reader: RunDirectory, shards: list[Shard], place: str
) -> tuple[MetadataStore, Term] | None:
    """A store, whose ``shards`` are told, and a term, however long that takes; None once the run has ended."""
    run = reader.path.name
    while True:
        shards.clear()
        try:
            store = await _open(launch.job, reader.path, shards)
        except StoreError as error:  # a server that does not answer yet, or the leader has the embedded store open
            log.info("%s", error)
            await asyncio.sleep(LOOK_AGAIN_S)
            continue
        try:
            if await _over(store, run):
                return None
            burying = asyncio.create_task(bury(store, run, own=place))
            try:
                term = await _candidate(launch, store, run, place).lead()
            finally:
                burying.cancel()
                await asyncio.gather(burying, return_exceptions=True)
            if not await _over(store, run):
                return store, term
            await term.resign()
            return None
        except (StoreError, Deposed) as error:
            log.info("standing again: %s", error)
        await store.close()


async def _over(store: MetadataStore, run: str) -> bool:
    status = await Facts(store, run).last_status()
    return status is not None and status.state in OVER


def _open(job: Job, directory: Path, shards: list[Shard]) -> Coroutine[Any, Any, MetadataStore]:
    settings = job.coordinator
    return open_store(
        settings.store,
        directory=directory / "metadata",
        timeout_s=settings.store_timeout_s,
        session_timeout_s=settings.session_s,
        credentials=credentials.named(settings.store_credentials),
        measure=shards,
    )


def _leave_when_over(term: Term, progress: Progress) -> None:
    """See the module docstring. A term that ends because it is resigned has nothing left to leave."""

    def leave(over: asyncio.Future[str]) -> None:
        if over.cancelled() or term.resigned:
            return
        progress.close()
        log.error("epoch %d is over: %s", term.epoch, over.result())
        if term.stepped_down:
            print(f"this process leads no longer: {over.result()}", flush=True)
        else:
            print(f"error: this process leads no longer: {over.result()}", file=sys.stderr, flush=True)
        logging.shutdown()
        os._exit(STEPPED_DOWN if term.stepped_down else DEPOSED)

    term.over.add_done_callback(leave)
