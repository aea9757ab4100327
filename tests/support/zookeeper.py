"""Real ZooKeeper servers on free loopback ports: they serve when the block begins and are gone when it ends.

``with zookeeper_servers(count=2) as addresses`` starts independent servers, ``with zookeeper_ensemble(size=3) as
addresses`` one replicated ensemble; ``running_servers`` and ``running_ensemble`` yield the ``Server`` objects, which
can be killed, paused and started again; ``secure_server`` one that speaks TLS besides. The kernel kills the servers
with the thread that started them, so that an interrupted run leaves none behind. Data lies in a temporary directory,
without fsync unless ``sync``.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.support.ports import free_ports

JARS = ("/usr/share/java/zookeeper.jar", "/usr/share/java/slf4j-simple.jar")
NETTY_JARS = tuple(  # what zookeeper.jar's own list of its libraries leaves out
    f"/usr/share/java/netty-{name}.jar" for name in ("codec", "resolver", "transport-native-unix-common")
)
START_TIMEOUT_S = 30.0
_ATTEMPTS = 3  # another process may take a free port before the server does
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before any fork


class ServerFailed(RuntimeError):
    """A server did not start; the message says what to do, or ends with the server's log."""


class Server:
    """One server process. ``more`` are further lines of its configuration: ``server.N`` for the members of an ensemble,
    what it needs for TLS. ``sync``: what it acknowledges is on the disk. ``environment`` is added to this process's."""

    def __init__(
        self,
        directory: Path,
        port: int,
        identity: int = 1,
        more: Sequence[str] = (),
        *,
        sync: bool = False,
        host: str = "127.0.0.1",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._environment = {**os.environ, **(environment or {})}
        self.address = f"{host}:{port}"
        self._directory = directory
        self._log = directory / "log"
        self._sync = "yes" if sync else "no"
        self._process: subprocess.Popen[bytes] | None = None
        (directory / "data").mkdir(parents=True)
        (directory / "data" / "myid").write_text(str(identity))
        (directory / "zoo.cfg").write_text(
            "\n".join(
                [
                    f"dataDir={directory / 'data'}",
                    f"clientPort={port}",
                    f"clientPortAddress={host}",
                    "admin.enableServer=false",
                    "tickTime=500",
                    "initLimit=20",
                    "syncLimit=10",
                    "minSessionTimeout=1000",
                    "maxSessionTimeout=60000",
                    *more,
                    "",
                ]
            )
        )

    def start(self) -> None:
        """Returns at once; ``mode`` tells when it serves."""
        parent = os.getpid()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    _java(),
                    *("-Xmx64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"),
                    *("-Dzookeeper.jmx.log4j.disable=true", f"-Dzookeeper.forceSync={self._sync}"),
                    *("-cp", ":".join(JARS + NETTY_JARS)),
                    "org.apache.zookeeper.server.quorum.QuorumPeerMain",
                    str(self._directory / "zoo.cfg"),
                ],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C in the terminal goes to the tests, which end the servers
                preexec_fn=lambda: _die_with(parent),  # noqa: PLW1509  (it makes two system calls and takes no lock)
            )

    def mode(self) -> str | None:
        return mode_of(self.address)

    def exited(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def kill(self) -> None:
        """SIGKILL, and wait for the end. Idempotent; ``start`` brings it back with its data."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It keeps its connections and answers nothing, as a machine does that hangs."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise ServerFailed(f"{self.address}: no process to send {number.name} to; start it first")
        self._process.send_signal(number)


@contextmanager
def running_servers(
    count: int = 1, *, sync: bool = False, host: str = "127.0.0.1", environment: Mapping[str, str] | None = None
) -> Iterator[list[Server]]:
    """Independent servers, all serving, at an address of this machine; ``environment`` is added to this process's."""
    server = partial(Server, sync=sync, host=host, environment=environment)
    with _directory() as directory, _killed_at_the_end() as servers:
        for number, port in enumerate(free_ports(count)):  # all begin at once: each takes a second
            servers.append(server(directory / f"{number}-0", port))
            servers[number].start()
        for number in range(count):
            attempt = 0
            while not _serves([servers[number]], last=attempt == _ATTEMPTS - 1):
                attempt += 1
                servers[number] = server(directory / f"{number}-{attempt}", free_ports(1)[0])
                servers[number].start()
        yield servers


@contextmanager
def running_ensemble(size: int = 3) -> Iterator[list[Server]]:
    """The members of one ensemble, all serving, one of them as the leader."""
    with _directory() as directory, _killed_at_the_end() as servers:
        for attempt in range(_ATTEMPTS):
            ports = free_ports(3 * size)
            peers = [
                f"server.{number + 1}=127.0.0.1:{ports[size + 2 * number]}:{ports[size + 2 * number + 1]}"
                for number in range(size)
            ]
            servers += [
                Server(directory / f"{number}-{attempt}", ports[number], number + 1, peers) for number in range(size)
            ]
            for server in servers:
                server.start()
            if _serves(servers, last=attempt == _ATTEMPTS - 1):
                break
            for server in servers:
                server.kill()
            servers.clear()
        yield servers


@contextmanager
def secure_server(own: Path, trusted: Path) -> Iterator[tuple[Server, str]]:
    """A server that serves, and its address for TLS, where it asks for a certificate. ``own`` (a key and a certificate)
    and ``trusted`` are PEM files."""
    with _directory() as directory, _killed_at_the_end() as servers:
        for attempt in range(_ATTEMPTS):
            port, secure = free_ports(2)
            tls = [
                f"secureClientPort={secure}",
                "secureClientPortAddress=127.0.0.1",
                "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory",
                *(f"ssl.keyStore.location={own}", "ssl.keyStore.type=PEM"),
                *(f"ssl.trustStore.location={trusted}", "ssl.trustStore.type=PEM"),
                "authProvider.x509=org.apache.zookeeper.server.auth.X509AuthenticationProvider",
            ]
            server = Server(directory / str(attempt), port, more=tls)
            servers.append(server)
            server.start()
            if _serves([server], last=attempt == _ATTEMPTS - 1):
                yield server, f"127.0.0.1:{secure}"
                return
            servers.remove(server)


@contextmanager
def zookeeper_servers(count: int = 1) -> Iterator[list[str]]:
    """Addresses (``host:port``) of independent servers."""
    with running_servers(count) as servers:
        yield [server.address for server in servers]


@contextmanager
def zookeeper_ensemble(size: int = 3) -> Iterator[list[str]]:
    """Addresses (``host:port``) of the members of one ensemble."""
    with running_ensemble(size) as servers:
        yield [server.address for server in servers]


def mode_of(address: str) -> str | None:
    """``standalone``, ``leader`` or ``follower``; None while no server serves there."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=1.0) as connection:
            connection.sendall(b"srvr")
            answer = b"".join(iter(lambda: connection.recv(4096), b"")).decode(errors="replace")
    except OSError:
        return None
    lines = [line for line in answer.splitlines() if line.startswith("Mode: ")]
    return lines[0].removeprefix("Mode: ") if lines else None


def _serves(servers: Sequence[Server], *, last: bool) -> bool:
    """Wait until all serve. False where one exited and there is another attempt, else ``ServerFailed``."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not all(server.mode() for server in servers):
        failed = next((server for server in servers if server.exited()), None)
        if failed is not None and not last:
            return False
        if failed is not None or time.monotonic() > deadline:
            silent = failed or next((server for server in servers if not server.mode()), servers[0])
            raise ServerFailed(
                f"ZooKeeper at {silent.address} does not serve ({'exited' if failed else 'no answer'}, waited up to "
                f"{START_TIMEOUT_S:g} s); its log ends:\n{silent.log_tail()}"
            )
        time.sleep(0.05)
    return True


def _java() -> str:
    """Raises ``ServerFailed`` naming the package where something is missing."""
    java = shutil.which("java")
    missing = [jar for jar in JARS if not Path(jar).exists()] + ([] if java else ["java"])
    if java is None or missing:
        raise ServerFailed(
            f"real ZooKeeper servers need {', '.join(missing)}, not found here; "
            "install them: apt-get install -y --no-install-recommends zookeeper"
        )
    return java


def _die_with(parent: int) -> None:
    """In the child, before java: ask for SIGKILL at the parent's death, and look whether it has happened already."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0 or os.getppid() != parent:
        os._exit(1)


@contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="zookeeper-") as directory:
        yield Path(directory)


@contextmanager
def _killed_at_the_end() -> Iterator[list[Server]]:
    servers: list[Server] = []
    try:
        yield servers
    finally:
        for server in servers:
            server.kill()
