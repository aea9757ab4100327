"""One HTTP endpoint with the figures of every node: ``GET /metrics``, for Prometheus and nothing else.

Invariant: a client can cost no more than its share: it has ``REQUEST_S`` to ask, ``MOST_BYTES`` to do it in, at most
``CLIENTS`` are served at a time, and all that ask at once share one look at the run. Plain HTTP: it listens on loopback
unless the job says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from coordinator.desk.exposition import CONTENT_TYPE

log = logging.getLogger(__name__)

REQUEST_S = 10.0
HURRIED_S = 0.5
"""For a client too many, which is only told so."""

ANSWER_S = 30.0
MOST_BYTES = 16 * 1024
CLIENTS = 16


class Endpoint:
    """See the module docstring. ``figures`` makes the text of one scrape."""

    def __init__(self, figures: Callable[[], Awaitable[str]]) -> None:
        self._figures = figures
        self._server: asyncio.Server | None = None
        self._clients: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._look: asyncio.Task[str] | None = None

    async def start(self, host: str, port: int) -> str:
        """Listen; returns the address. Raises ``OSError``."""
        self._server = await asyncio.start_server(self._accept, host, port, limit=MOST_BYTES)
        bound = self._server.sockets[0].getsockname()
        name = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        return f"http://{name}:{bound[1]}/metrics"

    async def stop(self) -> None:
        """No more clients; those that are there are cut off. Idempotent."""
        if self._server is not None:
            self._server.close()
        if self._look is not None:
            self._look.cancel()
        for writer in self._clients.values():  # which ends what serves it
            writer.transport.abort()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a client is served by a task")
        room = len(self._clients) < CLIENTS
        self._clients[task] = writer
        try:
            async with asyncio.timeout(REQUEST_S if room else HURRIED_S):
                request = await reader.readuntil(b"\r\n\r\n")
            async with asyncio.timeout(ANSWER_S):
                writer.write(await self._answer(request) if room else _response(503, "too many clients\n"))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            log.info("a client of the metrics endpoint went away or took too long: %r", error)
        finally:
            await _closed(writer)
            del self._clients[task]

    async def _answer(self, request: bytes) -> bytes:
        words = request.split(b"\r\n", 1)[0].split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response(400, "expected a request of HTTP/1.1\n")
        method, path = words[0], words[1].split(b"?", 1)[0]
        if path not in (b"/metrics", b"/"):
            return _response(404, "the figures are at /metrics\n")
        if method not in (b"GET", b"HEAD"):
            return _response(405, "expected GET\n")
        if path == b"/":
            return _response(200, "the figures are at /metrics\n", body=method == b"GET")
        return _response(200, await self._shared(), body=method == b"GET")

    async def _shared(self) -> str:
        if self._look is None or self._look.done():
            self._look = asyncio.ensure_future(self._figures())
        await asyncio.wait([self._look])
        if self._look.cancelled():
            raise ConnectionAbortedError("the endpoint closes")
        return self._look.result()


def _response(status: int, text: str, *, body: bool = True) -> bytes:
    phrase = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
    kind = CONTENT_TYPE if status == 200 else "text/plain; charset=utf-8"
    content = text.encode()
    head = f"HTTP/1.1 {status} {phrase[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + (content if body else b"")


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
