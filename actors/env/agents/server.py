"""The HTTP endpoint that agents ask: ``/v1/models``, ``/v1/chat/completions``, ``/v1/completions``, ``/v1/sessions``.

Invariant: a client can cost no more than its share: it has ``HEAD_S`` to ask something (and to ask again), ``BODY_S``
to send a body of at most ``MOST_BYTES``, as it is (nothing is decompressed), ``READ_S`` to read on in what it is
answered, and at most ``CLIENTS`` are connected at a time. What it does wrong is told to it, not to the log. Every
request needs the key of a session. Every error has the form of OpenAI's (but what is no HTTP, which a plain 400 ends).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from actors.env.agents.answers import (
    Turn,
    answer_size,
    chat_answer,
    chat_pieces,
    error_body,
    models,
    text_answer,
    text_pieces,
)
from actors.env.agents.asked import Chat, Refused, Text, read_chat, read_text
from actors.env.agents.play import Sessions
from actors.env.agents.session import Session, beside_the_loop
from actors.env.tokenizers import Tokenizer

log = logging.getLogger(__name__)
http_log = logging.getLogger(f"{__name__}.http")
http_log.setLevel(logging.CRITICAL)  # the library's, which tells of each client that is no HTTP or breaks off

HEAD_S = 30.0
BODY_S = 30.0
READ_S = 30.0
MOST_BYTES = 16 * 1024 * 1024
CLIENTS = 4096
STOP_S = 2.0
BODY_LEFT = (408, 413, 415)
"""Answers that come before all of a body."""
SESSIONS = "/v1/sessions"
BACKLOG = 1024
BYTES_OF_GUEST = 128
"""About what a line of the list of sessions takes."""


class HttpEndpoint:
    """See the module docstring."""

    def __init__(self) -> None:
        self._runner: web.ServerRunner | None = None
        self._server: asyncio.Server | None = None

    async def start(self, sessions: Sessions) -> str:
        """See ``actors.env.agents.play.Endpoint``."""
        settings = sessions.settings
        answering = _Answering(sessions)
        http = web.Server(
            answering.answer, access_log=None, logger=http_log, keepalive_timeout=HEAD_S, auto_decompress=False
        )
        self._runner = web.ServerRunner(http, shutdown_timeout=STOP_S)
        await self._runner.setup()

        loop = asyncio.get_running_loop()

        def connected() -> asyncio.Protocol:
            here = http.connections
            if len(here) + len(answering.arriving.difference(here)) >= CLIENTS:
                return _Full()
            client = http()
            answering.arriving.add(client)
            # Behind its ``connection_made``: several come at once.
            loop.call_soon(loop.call_soon, answering.arriving.discard, client)
            answering.silent.add(client)
            loop.call_later(HEAD_S, answering.let_go, client)
            return client

        self._server = await loop.create_server(connected, settings.host, settings.port, backlog=BACKLOG)
        for listening in self._server.sockets:  # and what it accepts
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(READ_S * 1000))
        host, port = self._server.sockets[0].getsockname()[:2]
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # agents run on this host
        url = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
        log.info("agents ask %s", url)
        return url

    async def stop(self) -> None:
        """Idempotent."""
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()


class _Full(asyncio.Protocol):
    """For a client too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.WriteTransport):
            transport.abort()


class _Answering:
    """What each path answers."""

    def __init__(self, sessions: Sessions) -> None:
        self.arriving: set[web.RequestHandler] = set()  # perhaps not among the server's connections yet
        self.silent: set[web.RequestHandler] = set()  # who has not asked anything yet
        self._sessions = sessions
        self._paths: dict[str, tuple[str, Callable[[web.BaseRequest, Session], Awaitable[web.StreamResponse]]]] = {
            "/v1/models": ("GET", self._models),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._text),
        }

    def let_go(self, client: web.RequestHandler) -> None:
        """If it is still silent."""
        if client in self.silent:
            self.silent.remove(client)
            client.force_close()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.silent.discard(request.protocol)
        try:
            return await self._answer(request)
        except Refused as refused:
            answer = refused
        except Exception:  # a fault of ours must cost one request, and say so
            log.exception("%s %s failed", request.method, request.path)
            answer = Refused(500, "the endpoint failed; its log says how", code="internal_error")
        headers = {"Connection": "close"} if answer.status in BODY_LEFT else {}
        return _json(error_body(answer), answer.status, headers)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path.rstrip("/")
        if path == SESSIONS or path.startswith(f"{SESSIONS}/"):
            return await self._guests(request, path.removeprefix(SESSIONS).removeprefix("/"))
        one_model = path.startswith("/v1/models/")
        method, handle = self._paths.get("/v1/models" if one_model else path, ("", None))
        if handle is None:
            raise Refused(404, f"no such path: {path}; there are {', '.join(self._paths)}", code="not_found")
        if request.method != method:
            raise Refused(405, f"{path}: expected {method}, found {request.method}", code="method_not_allowed")
        return await handle(request, self._sessions.of(_key(request)))

    async def _guests(self, request: web.BaseRequest, name: str) -> web.StreamResponse:
        guests, _ = self._sessions.guests_of(_key(request))
        if request.method != "GET" and not (request.method == "DELETE" and name):
            raise Refused(405, f"{request.path}: expected GET, or DELETE of one", code="method_not_allowed")
        if name:
            record = guests.end(name) if request.method == "DELETE" else guests.told(name)
            return await beside_the_loop(record.size, lambda: _json(record.plain()))
        listed = guests.listed()
        return await beside_the_loop(BYTES_OF_GUEST * len(listed), _json, {"object": "list", "data": listed})

    async def _models(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
        listed = models([self._sessions.rules.model])
        if request.path.rstrip("/") == "/v1/models":
            return _json(listed)
        name = request.path.removeprefix("/v1/models/")
        found = [model for model in listed["data"] if model["id"] == name]
        if not found:
            raise Refused(404, f"no such model: {name}; there is {self._sessions.rules.model}", code="model_not_found")
        return _json(found[0])

    async def _chat(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
        body = await _body(request)
        asked = await beside_the_loop(len(body), read_chat, body, self._sessions.settings.ignore)
        return await self._play(request, session, body, asked)

    async def _text(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
        body = await _body(request)
        asked = await beside_the_loop(len(body), read_text, body, self._sessions.settings.ignore)
        return await self._play(request, session, body, asked)

    async def _play(
        self, request: web.BaseRequest, session: Session, body: bytes, asked: Chat | Text
    ) -> web.StreamResponse:
        answered = await session.ask(body, asked, lambda: _is_there(request))
        turn = answered.task.result()
        tokenizer = self._sessions.renderer.tokenizer
        response = await beside_the_loop(answer_size(turn, asked.sampling), _told, turn, asked, tokenizer)
        answered.delivered = _is_there(request)
        return response


def _told(turn: Turn, asked: Chat | Text, tokenizer: Tokenizer) -> web.Response:
    """A turn as its client wants it."""
    sampling = asked.sampling
    if not sampling.stream:
        whole = chat_answer if isinstance(asked, Chat) else text_answer
        return _json(whole(turn, sampling, tokenizer))
    pieces = chat_pieces if isinstance(asked, Chat) else text_pieces
    return web.Response(
        body=b"".join(b"data: %s\n\n" % msgspec.json.encode(each) for each in pieces(turn, sampling, tokenizer))
        + b"data: [DONE]\n\n",
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"},
    )


def _is_there(request: web.BaseRequest) -> bool:
    """Whether the client still waits."""
    return request.transport is not None and not request.transport.is_closing()


def _key(request: web.BaseRequest) -> str:
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() != "bearer" or not key:
        what = "expected the session's API key, as Authorization: Bearer KEY"
        raise Refused(401, what, code="invalid_api_key")
    return key.strip()


async def _body(request: web.BaseRequest) -> bytes:
    """Raises ``Refused``."""
    packed = request.headers.get("Content-Encoding", "identity").strip().lower()
    if packed != "identity":
        raise Refused(415, f"expected a body without Content-Encoding, found {packed}", code="unsupported_encoding")
    try:
        async with asyncio.timeout(BODY_S):
            if request.headers.get("Expect", "").strip().lower() == "100-continue":
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                request.writer.output_size = 0
            return await _limited(request)
    except TimeoutError:
        raise Refused(408, f"the body has not arrived within {BODY_S:g} s", code="request_timeout") from None
    except (web.RequestPayloadError, ConnectionError) as error:
        raise Refused(400, f"the body broke off: {error}", code="invalid_body") from None


async def _limited(request: web.BaseRequest) -> bytes:
    parts, size = list[bytes](), 0
    async for part in request.content.iter_any():
        size += len(part)
        if size > MOST_BYTES:
            raise Refused(413, f"the body is longer than {MOST_BYTES} bytes", code="request_too_large")
        parts.append(part)
    return b"".join(parts)


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json", headers=headers or {}
    )
