"""A server that is asked over HTTP: whole answers, and answers that come in pieces.

Invariant: every call ends: by its answer, by the caller (``Stream.close``, from any thread) or by a named error, at the
latest when the server says nothing for so long as its caller bears.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

SILENCE_S = 120.0
"""Of a server that is asked for a whole answer, or has not begun one."""
STREAM_SILENCE_S = 3600.0
"""Between two events: a request may wait long in the server's queue, behind those of others. An engine from which no
token comes at all is found out sooner, by ``rollout.progress_timeout_s``."""
REFUSALS = (http.client.BAD_REQUEST, http.client.REQUEST_ENTITY_TOO_LARGE, http.client.UNPROCESSABLE_ENTITY)
"""What says that a request is wrong; other statuses, as that of a wrong key, meet every request."""


class ServerError(RuntimeError):
    """The server cannot be reached, or does not do what it was asked; the message has the URL and its words."""


class RequestRefused(ServerError):
    """The server serves, but will not serve this request."""


class Server:
    """``url``: as ``http://host:port``, with a path where the interface has one; ``key``: sent as a bearer token."""

    def __init__(self, url: str, key: str | None = None, *, silence_s: float = SILENCE_S) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected a URL as http://host:port, found {url!r}")
        self.url = url.rstrip("/")
        self.silence_s = silence_s
        self._https = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def ask(self, path: str, body: dict[str, Any] | None = None, *, silence_s: float | None = None) -> Any:
        """The JSON answer: of a POST with ``body``, else of a GET. Raises ``ServerError``."""
        stream = Stream(self, path, body, self.silence_s if silence_s is None else silence_s)
        try:
            return json.loads(stream.read())
        except ValueError as error:
            raise ServerError(f"{self.url}{path}: expected JSON, found {error}") from None
        finally:
            stream.close()

    def stream(self, path: str, body: dict[str, Any]) -> Stream:
        """The answer's events. Raises ``ServerError``, and ``RequestRefused`` where the request is wrong."""
        stream = Stream(self, path, body, self.silence_s)
        stream.bear(STREAM_SILENCE_S)
        return stream

    def connect(self, silence_s: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=silence_s)
        connection.connect()
        return connection

    def send(self, connection: http.client.HTTPConnection, path: str, body: dict[str, Any] | None) -> None:
        encoded = None if body is None else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", self._path + path, encoded, self._headers)


class Stream:
    """One answer of a server."""

    def __init__(self, server: Server, path: str, body: dict[str, Any] | None, silence_s: float) -> None:
        self._what = f"{server.url}{path}"
        try:
            self._connection = server.connect(silence_s)
            self._socket: socket.socket = self._connection.sock  # the response keeps it, and would not say so
            server.send(self._connection, path, body)
            self._response = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self._what}: {type(error).__name__}: {error}") from None
        if self._response.status != http.client.OK:
            try:
                words = self.read(2000).decode("utf-8", "replace")
            finally:
                self.close()
            kind = RequestRefused if self._response.status in REFUSALS else ServerError
            raise kind(f"{self._what}: status {self._response.status}: {words}")

    def bear(self, silence_s: float) -> None:
        """Wait so long for what comes next, from now on."""
        self._socket.settimeout(silence_s)

    def read(self, at_most: int | None = None) -> bytes:
        try:
            return self._response.read(at_most)
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self._what}: {type(error).__name__}: {error}") from None

    def events(self) -> Iterator[Any]:
        """Of an event stream (``data: JSON`` lines, the last one ``[DONE]``)."""
        try:
            for line in self._response:
                data = line.strip()
                if data == b"data: [DONE]":
                    return
                if data.startswith(b"data:"):
                    yield json.loads(data[5:])
        except (OSError, ValueError, AttributeError, http.client.HTTPException) as error:  # AttributeError: closed
            raise ServerError(f"{self._what}: {type(error).__name__}: {error}") from None
        raise ServerError(f"{self._what}: the answer broke off")

    def close(self) -> None:
        """The server takes it as an abort; whoever reads gets a ``ServerError``."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._connection.close()
