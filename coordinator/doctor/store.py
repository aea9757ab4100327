"""The metadata store as a run uses it: a session, and changes that are on the servers' disks.

Invariant: what is written is an ephemeral entry of this process, deleted again; it is gone with the session anyway.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time

from coordinator.metadata import open_sharded, parse_spec
from coordinator.metadata.credentials import Credentials
from coordinator.metadata.protocol import MetadataStore, StoreError
from hwprobe.doctor import Examined, Unable

TIMEOUT_S = 5.0
ROUNDS = 10
SLOW_S = 0.1
FLUSHES = 4.0
"""So many times as long as a read a change has to take for its flush to be the reason; both go the same way."""


def look(spec: str, credentials: Credentials | None = None) -> Examined:
    """Raises ``Unable`` for the embedded store."""
    if not parse_spec(spec):
        raise Unable("the store is embedded, or none was named (--store zk://HOST:PORT)")
    return asyncio.run(_look(spec, credentials))


async def _look(spec: str, credentials: Credentials | None) -> Examined:
    examined = Examined()
    try:
        store = await open_sharded(spec, timeout_s=TIMEOUT_S, credentials=credentials)
        try:
            rounds = [await _round(store_path(), store) for _ in range(ROUNDS)]
        finally:
            await store.close()
    except StoreError as error:
        examined.error(
            spec,
            str(error),
            "no session can be opened, or the servers take no changes: see zookeeper; or the credentials are others'",
            "start the servers that are down; give the credentials of the run (--credentials)",
        )
        return examined
    changes, reads = zip(*rounds, strict=True)
    best, middle, read = min(changes), sorted(changes)[len(changes) // 2], min(reads)
    if best <= SLOW_S:
        examined.note(f"a change takes {1000 * best:.1f} ms at best, {1000 * middle:.1f} ms in the middle")
        return examined
    evidence = (
        f"the fastest of {ROUNDS} changes took {1000 * best:.0f} ms, expected at most {1000 * SLOW_S:g} ms; the "
        f"fastest read {1000 * read:.1f} ms"
    )
    if best > FLUSHES * read:
        examined.warning(
            spec,
            evidence,
            "a server's disk is slow: a change is answered once it is flushed (fsync of its log), a read at once",
            "give every server a disk of its own for dataLogDir, and look for 'fsync-ing the write ahead log' in its "
            "log; a leader whose store hangs for coordinator.session_s loses the lead",
        )
    else:
        examined.warning(
            spec,
            evidence,
            "the servers are far away or overloaded: reads, which touch no disk, take as long",
            "keep them near the coordinators, with a processor and a heap of their own (see zookeeper); a leader whose "
            "store hangs for coordinator.session_s loses the lead",
        )
    return examined


def store_path() -> str:
    return f"/doctor/{socket.gethostname()}-{os.getpid()}"


async def _round(path: str, store: MetadataStore) -> tuple[float, float]:
    """How long a change takes, and a read."""
    started = time.monotonic()
    await store.create(path, b"", ephemeral=True)
    created = time.monotonic()
    await store.get(path)
    read = time.monotonic()
    await store.delete(path)
    return created - started, read - created
