"""Proof that a process is gone, without waiting for its session's end: the kernel closes its sockets.

Whoever would lead listens on a port on which nothing is ever said; whoever stands by holds a connection to it. When
that ends, and a new one is refused by its own machine, no process is left that could lead. Nothing else counts: a
process that is stopped or starved keeps its connections, a machine or network that is gone refuses nothing. There the
session decides.

Invariant: who never had a connection never takes a refusal for a proof (a firewall refuses, too); nor does anybody who
would look for a loopback address on another machine than the one that means it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path

from bus.security import is_loopback

MOST_CONNECTIONS = 64
CONNECT_S = 5.0
AGAIN_S = 0.2
"""Between two attempts to find out."""


@cache
def machine() -> str:
    """Names what a loopback address belongs to: this boot of this kernel, and this network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"


@asynccontextmanager
async def pulse(host: str) -> AsyncIterator[str]:
    """Listens while the block runs; yields where, as ``host:port``, or ``host:port@machine`` where that is needed.
    Raises ``OSError``."""
    held: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(held) >= MOST_CONNECTIONS:
            writer.close()
            return
        held[writer] = asyncio.current_task()
        try:
            with suppress(ConnectionError):
                await reader.read(1)  # nothing comes until the other side ends
        finally:
            del held[writer]
            writer.close()

    server = await asyncio.start_server(hold, host, 0)
    try:
        place = f"{host}:{server.sockets[0].getsockname()[1]}"
        yield f"{place}@{machine()}" if is_loopback(host) else place
    finally:
        server.close()
        holding = [task for task in held.values() if task is not None]
        for writer in list(held):
            writer.close()
        await asyncio.gather(*holding, return_exceptions=True)  # asyncio complains of those that are cancelled


async def until_gone(address: str) -> None:
    """Returns once it is proven that nobody listens there any more; where there can be no proof, never."""
    place, _, where = address.partition("@")
    if where and where != machine():
        await asyncio.Event().wait()
    host, _, port = place.rpartition(":")
    connected = False
    while True:
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(host, int(port))
        except ConnectionRefusedError:
            if connected:
                return
        except (OSError, TimeoutError):
            connected = False  # whatever answers there next may be something else
        else:
            connected = True
            await _until_closed(reader, writer)
            continue  # ask at once whether it is there
        await asyncio.sleep(AGAIN_S)


async def _until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        with suppress(ConnectionError):
            while await reader.read(64):
                pass
    finally:
        writer.close()
