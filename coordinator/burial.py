"""Candidates whose processes are proven to be gone are taken out of the queue, instead of waiting for their sessions to
end: whoever stands by does it for all others, the leader among them.

    /leader/<run>/candidates/c-0000000007  --its pulse--> connected --closed by the kernel, refused--> deleted

Each candidate tells its pulse (``coordinator.pulse``) with its standing. So a connection to it is there long before it
leads, and one that dies in the moment in which it takes over is found out like any other; and of two that die together,
the second in the queue does not keep the third one waiting.

Invariant: an entry is only taken away once its process is gone. Where that cannot be proven, its session decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import msgspec

from coordinator.leadership import Standing, queue_of
from coordinator.metadata.protocol import MetadataStore, NoEntry, StoreError, StoreTimeout
from coordinator.pulse import until_gone

log = logging.getLogger(__name__)

AGAIN_S = 0.1
"""Before a store is asked again that did not answer."""


async def bury(store: MetadataStore, run: str, *, own: str) -> None:
    """Until cancelled, or the store is closed. ``own`` is this process's pulse. Raises ``StoreError``."""
    watched: dict[str, asyncio.Task[None]] = {}
    try:
        async with aclosing(store.watch(queue_of(run))) as changes:
            while True:
                await _patiently(lambda: _look(store, queue_of(run), own, watched))
                if await anext(changes, None) is None:
                    return
    finally:
        for task in watched.values():
            task.cancel()
        await asyncio.gather(*watched.values(), return_exceptions=True)


async def _look(store: MetadataStore, queue: str, own: str, watched: dict[str, asyncio.Task[None]]) -> None:
    """Hold a connection to every other candidate."""
    names = await store.children(queue)
    for name in [name for name in watched if name not in names]:
        watched.pop(name).cancel()
    for name in names:
        entry = None if name in watched else await store.get(f"{queue}/{name}")
        if entry is None:
            continue
        standing = msgspec.json.decode(entry.value, type=Standing)
        if standing.pulse and standing.pulse != own:
            watched[name] = asyncio.create_task(_bury_when_gone(store, entry.path, standing))


async def _bury_when_gone(store: MetadataStore, path: str, standing: Standing) -> None:
    await until_gone(standing.pulse)
    log.warning("%s is gone: its entry %s is taken away", standing.name, path)
    try:
        await _patiently(lambda: store.delete(path))
    except NoEntry:
        return  # somebody else did it, or its session is over
    except StoreError as error:  # whoever stands by learns of it by himself
        log.info("%s stays: %s", path, error)


async def _patiently(call: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            return await call()
        except StoreTimeout as error:
            log.info("asking again: %s", error)
            await asyncio.sleep(AGAIN_S)
