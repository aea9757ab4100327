"""A server that is asked over HTTP: whole answers, and answers that come in pieces.

Invariant: every call ends: by its answer, by the caller (``Stream.close``, from any thread) or by a named error, at the
latest when the server says nothing for ``silence_s``.
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


class ServerError(RuntimeError):
    """The server cannot be reached, or does not do what it was asked; the message has the URL and its words."""


class Server:
    """``url``: as ``http://host:port``, with a path where the interface has one; ``key``: sent as a bearer token."""

    def __init__(self, url: str, key: str | None = None, *, silence_s: float = SILENCE_S) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected a URL as http://host:port, found {url!r}")
        self.url = url.rstrip("/")
        self._https = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._silence_s = silence_s

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON answer: of a POST with ``body``, else of a GET. Raises ``ServerError``."""
        stream = Stream(self, path, body)
        try:
            return json.loads(stream.read())
        except ValueError as error:
            raise ServerError(f"{self.url}{path}: expected JSON, found {error}") from None
        finally:
            stream.close()

    def stream(self, path: str, body: dict[str, Any]) -> Stream:
        """The answer's events. Raises ``ServerError``."""
        return Stream(self, path, body)

    def connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._silence_s)
        connection.connect()
        return connection

    def send(self, connection: http.client.HTTPConnection, path: str, body: dict[str, Any] | None) -> None:
        encoded = None if body is None else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", self._path + path, encoded, self._headers)


class Stream:
    """One answer of a server."""

    def __init__(self, server: Server, path: str, body: dict[str, Any] | None) -> None:
        self._what = f"{server.url}{path}"
        try:
            self._connection = server.connect()
            self._socket: socket.socket = self._connection.sock  # the response keeps it, and would not say so
            server.send(self._connection, path, body)
            self._response = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self._what}: {type(error).__name__}: {error}") from None
        if self._response.status != http.client.OK:
            words = self._response.read(2000).decode("utf-8", "replace")
            self.close()
            raise ServerError(f"{self._what}: status {self._response.status}: {words}")

    def read(self) -> bytes:
        try:
            return self._response.read()
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
