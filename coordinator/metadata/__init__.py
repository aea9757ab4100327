"""Where the small, slow facts are kept. ``open_store`` picks the store that a job names; its users see the protocol."""

from __future__ import annotations

import asyncio
from pathlib import Path

from coordinator.metadata.embedded import EmbeddedStore
from coordinator.metadata.measured import MeasuredStore, Shard
from coordinator.metadata.protocol import MetadataStore, StoreError
from coordinator.metadata.sharded import ShardedStore
from coordinator.metadata.spec import parse_spec

__all__ = ["open_store", "parse_spec"]


SESSION_TIMEOUT_S = 4.0


async def open_store(
    spec: str,
    *,
    directory: Path,
    timeout_s: float,
    session_timeout_s: float = SESSION_TIMEOUT_S,
    measure: list[Shard] | None = None,
) -> MetadataStore:
    """Open the store that ``spec`` names (``embedded`` lies in ``directory``); no call of it takes longer than
    ``timeout_s``, and ZooKeeper servers end its session when they hear nothing for ``session_timeout_s``. ``measure``
    gets an entry for each shard, which goes on counting its calls. Raises ``ValueError`` for a spec that says nothing,
    ``StoreTimeout`` where no server answers, ``StoreError`` where the store cannot be used."""
    ensembles = parse_spec(spec)
    if not ensembles:
        return _measured(await EmbeddedStore.open(directory, timeout_s=timeout_s), spec, measure)
    opened = await _open_ensembles(ensembles, timeout_s, session_timeout_s)
    stores = [_measured(store, name, measure) for store, name in zip(opened, ensembles, strict=True)]
    if len(stores) == 1:
        return stores[0]
    try:
        return await ShardedStore.open(stores, name=spec, timeout_s=timeout_s)
    except BaseException:
        await _close_all(stores)
        raise


def _measured(store: MetadataStore, name: str, measure: list[Shard] | None) -> MetadataStore:
    if measure is None:
        return store
    measure.append(Shard(name))
    return MeasuredStore(store, measure[-1])


async def _open_ensembles(
    ensembles: tuple[str, ...], timeout_s: float, session_timeout_s: float
) -> list[MetadataStore]:
    """All of them, or none stays open."""
    try:
        # Here, so that a job without a server runs where kazoo is not installed.
        from coordinator.metadata.zookeeper import ZooKeeperStore  # noqa: PLC0415
    except ImportError as error:
        raise StoreError(f"zk://{ensembles[0]}: a ZooKeeper store needs the package kazoo: {error}") from error
    opening = [
        asyncio.create_task(ZooKeeperStore.open(hosts, timeout_s=timeout_s, session_timeout_s=session_timeout_s))
        for hosts in ensembles
    ]
    try:
        return list(await asyncio.gather(*opening))
    except BaseException:
        await asyncio.wait(opening)
        await _close_all([task.result() for task in opening if not task.cancelled() and task.exception() is None])
        raise


async def _close_all(stores: list[MetadataStore]) -> None:
    await asyncio.gather(*(store.close() for store in stores), return_exceptions=True)
