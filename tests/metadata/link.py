"""A network link that can be cut: a client connects to ``address``, and while it holds it reaches the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Link:
    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._holds = True
        self._writers: set[asyncio.StreamWriter] = set()
        self.address = ""

    def cut(self) -> None:
        """Drop the connections and accept none."""
        self._holds = False
        for writer in self._writers:
            writer.transport.abort()

    def mend(self) -> None:
        self._holds = True

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._holds:
            writer.transport.abort()
            return
        try:
            onward, outward = await asyncio.open_connection(*self._server)
        except OSError:  # the server is down: so is the link
            writer.transport.abort()
            return
        self._writers |= {writer, outward}
        await asyncio.gather(_copy(reader, outward), _copy(onward, writer))
        self._writers -= {writer, outward}


@asynccontextmanager
async def link_to(server: str) -> AsyncIterator[Link]:
    link = Link(server)
    listener = await asyncio.start_server(link.accept, "127.0.0.1", 0)
    link.address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield link
    finally:
        link.cut()
        listener.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        return
    finally:
        writer.close()
