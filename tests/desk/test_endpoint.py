"""The metrics endpoint is a small, bounded HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from coordinator.desk.endpoint import Endpoint


async def sent(address: str, request: bytes) -> bytes:
    """All that comes back."""
    host, _, rest = address.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(rest.split("/")[0]))
    writer.write(request)
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    return answer


@asynccontextmanager
async def listening(endpoint: Endpoint) -> AsyncIterator[str]:
    try:
        yield await endpoint.start("127.0.0.1", 0)
    finally:
        await endpoint.stop()


async def one() -> str:
    return "a 1\n"


async def test_it_answers_get_metrics_in_the_text_format() -> None:
    async with listening(Endpoint(one)) as address:
        head, _, body = (await sent(address, b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"Content-Type: text/plain; version=0.0.4; charset=utf-8" in head
    assert b"Content-Length: 4" in head
    assert body == b"a 1\n"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /else HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"HEAD /metrics HTTP/1.0\r\n\r\n", b"200"),
    ],
)
async def test_everything_else_is_refused_by_its_status(request_: bytes, status: bytes) -> None:
    async with listening(Endpoint(one)) as address:
        answer = await sent(address, request_)
    assert answer.split()[1] == status
    assert not answer.endswith(b"a 1\n")


async def test_who_asks_at_once_shares_one_look_at_the_run() -> None:
    looks = 0
    looked, go = asyncio.Event(), asyncio.Event()

    async def slow() -> str:
        nonlocal looks
        looks += 1
        looked.set()
        await go.wait()
        return f"looks {looks}\n"

    async with listening(Endpoint(slow)) as address:
        asking = [asyncio.create_task(sent(address, b"GET /metrics HTTP/1.1\r\n\r\n")) for _ in range(5)]
        await looked.wait()
        await asyncio.sleep(0.2)
        go.set()
        answers = await asyncio.gather(*asking)
    assert {answer.partition(b"\r\n\r\n")[2] for answer in answers} == {b"looks 1\n"}


async def test_a_client_that_says_nothing_or_too_much_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.desk.endpoint.REQUEST_S", 0.2)
    async with listening(Endpoint(one)) as address:
        assert await sent(address, b"GET /metrics") == b""
        assert (await sent(address, b"GET /metrics HTTP/1.1\r\n\r\n")).endswith(b"a 1\n")


async def test_clients_beyond_the_bound_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.desk.endpoint.CLIENTS", 1)
    async with listening(Endpoint(one)) as address:
        host, _, rest = address.removeprefix("http://").rpartition(":")
        _, writer = await asyncio.open_connection(host, int(rest.split("/")[0]))
        await asyncio.sleep(0.1)
        assert (await sent(address, b"GET /metrics HTTP/1.1\r\n\r\n")).split()[1] == b"503"
        writer.close()
