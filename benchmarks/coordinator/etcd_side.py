"""One etcd server, and a client over gRPC: what it costs to put the same values there.

The two messages that are needed are put together here (protobuf's wire format: a tag, a length, the bytes), so that no
client library comes into the measurement; of the answers nothing is needed but that they came.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc

from tests.support.ports import free_ports

START_S = 60.0
CALL_S = 30.0
END_S = 10.0
_PUT = "/etcdserverpb.KV/Put"


class EtcdMissing(RuntimeError):
    """There is no etcd here; the message says what to install."""


class EtcdClient:
    """Puts values."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._put = channel.unary_unary(_PUT, request_serializer=None, response_deserializer=None)

    async def write(self, path: str, value: bytes) -> None:
        await self._put(_field(1, path.encode()) + _field(2, value), timeout=CALL_S)


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


@asynccontextmanager
async def client(address: str) -> AsyncIterator[EtcdClient]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield EtcdClient(channel)


@contextmanager
def server() -> Iterator[str]:
    """Its address. It syncs to disk, as it comes."""
    etcd = shutil.which("etcd")
    if etcd is None:
        raise EtcdMissing("no etcd is installed; apt-get install -y --no-install-recommends etcd-server")
    with tempfile.TemporaryDirectory(prefix="rollart-etcd-") as directory:
        client_port, peer_port = free_ports(2)
        address, peer = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
        log = Path(directory) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    *(etcd, "--data-dir", f"{directory}/data", "--log-level", "warn"),
                    *("--listen-client-urls", address, "--advertise-client-urls", address),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", f"default={peer}"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            _wait(process, client_port, log)
            yield f"127.0.0.1:{client_port}"
        finally:
            process.kill()
            process.wait(END_S)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
                connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
                if b'"health":"true"' in b"".join(iter(lambda: connection.recv(4096), b"")):
                    return
        except OSError:
            pass
        time.sleep(0.1)
    raise EtcdMissing(f"etcd does not serve; its log ends:\n{log.read_text(errors='replace')[-2000:]}")
