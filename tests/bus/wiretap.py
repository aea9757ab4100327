"""A proxy that stands between two nodes and keeps every byte that passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from bus.message import NodeAddress


class Tap:
    """What came by, connection by connection."""

    def __init__(self, address: NodeAddress) -> None:
        self.address = address  # goes through the tap, on the control lane
        self.sent: list[list[bytes]] = []  # what each connection's client said, piece by piece
        self.answered: list[list[bytes]] = []

    @property
    def all(self) -> bytes:
        return b"".join(piece for pieces in (*self.sent, *self.answered) for piece in pieces)


@asynccontextmanager
async def tapped(target: NodeAddress) -> AsyncIterator[Tap]:
    """Listen in on the way to a node's control lane."""
    host, _, port = target.control.removeprefix("tcp://").rpartition(":")
    tap = Tap(target)
    running: set[asyncio.Task[None]] = set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: list[bytes]) -> None:
        try:
            while data := await reader.read(65_536):
                record.append(data)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # one end is gone; the other is told below
        finally:
            writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        tap.sent.append([])
        tap.answered.append([])
        for work in (pass_on(reader, far_writer, tap.sent[-1]), pass_on(far_reader, writer, tap.answered[-1])):
            task = asyncio.create_task(work)
            running.add(task)
            task.add_done_callback(running.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    tap.address = msgspec.structs.replace(target, control=f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield tap
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await server.wait_closed()
