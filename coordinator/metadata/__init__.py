"""Where the small, slow facts are kept. ``open_store`` picks the store that a job names; its users see the protocol."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from coordinator.metadata import measured
from coordinator.metadata.credentials import Credentials
from coordinator.metadata.embedded import EmbeddedStore
from coordinator.metadata.protocol import MetadataStore, StoreError
from coordinator.metadata.shard import Shard
from coordinator.metadata.sharded import ShardedStore
from coordinator.metadata.spec import parse_spec

__all__ = ["open_sharded", "open_store", "parse_spec"]


SESSION_TIMEOUT_S = 4.0


async def open_store(
    spec: str,
    *,
    directory: Path,
    timeout_s: float,
    session_timeout_s: float = SESSION_TIMEOUT_S,
    measure: list[measured.Shard] | None = None,
    credentials: Credentials | None = None,
) -> MetadataStore:
    """Open the store that ``spec`` names (``embedded`` lies in ``directory``, and needs no ``credentials``); no call of
    it takes longer than ``timeout_s``, and ZooKeeper servers end its session when they hear nothing for
    ``session_timeout_s``. ``measure`` gets an entry for each shard, which goes on counting its calls. Raises
    ``ValueError`` for a spec that says nothing, ``StoreTimeout`` where no server answers, ``StoreError`` where the
    store cannot be used."""
    if not parse_spec(spec):
        return _measured(await EmbeddedStore.open(directory, timeout_s=timeout_s), spec, measure)
    return await open_sharded(
        spec,
        timeout_s=timeout_s,
        session_timeout_s=session_timeout_s,
        measure=measure,
        credentials=credentials,
    )


def _measured(store: Shard, name: str, measure: list[measured.Shard] | None) -> Shard:
    if measure is None:
        return store
    measure.append(measured.Shard(name))
    return measured.MeasuredStore(store, measure[-1])


async def open_sharded(
    spec: str,
    *,
    timeout_s: float,
    session_timeout_s: float = SESSION_TIMEOUT_S,
    measure: list[measured.Shard] | None = None,
    credentials: Credentials | None = None,
    without: Collection[str] = (),
) -> ShardedStore:
    """Open the ensembles that ``spec`` names, or whose home it names; one alone is a ring of one, and can grow.
    ``without``: see ``ShardedStore.open``. Raises as ``open_store`` does, ``ValueError`` for the embedded store too."""
    ensembles = parse_spec(spec)
    if not ensembles:
        raise ValueError(f"metadata store {spec!r}: one file on one machine, which has no shards; expected zk://...")
    try:
        # Here, so that a job without a server runs where kazoo is not installed.
        from coordinator.metadata.zookeeper import ZooKeeperStore  # noqa: PLC0415
    except ImportError as error:
        raise StoreError(f"zk://{ensembles[0]}: a ZooKeeper store needs the package kazoo: {error}") from error

    async def connect(hosts: str) -> Shard:
        store = await ZooKeeperStore.open(
            hosts, timeout_s=timeout_s, session_timeout_s=session_timeout_s, credentials=credentials
        )
        return _measured(store, hosts, measure)

    home = await connect(ensembles[0])
    try:
        return await ShardedStore.open(
            ensembles, home=home, connect=connect, name=spec, timeout_s=timeout_s, without=without
        )
    except BaseException:
        await home.close()
        raise
