"""Who may read and change what, on real servers: digest authentication with ACLs, and TLS."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from coordinator.metadata import open_store
from coordinator.metadata.credentials import Credentials, CredentialsError, Tls, read_credentials
from coordinator.metadata.protocol import Create, Entry, MetadataStore, StoreError, StoreTimeout, Write
from coordinator.metadata.zookeeper import ZooKeeperStore
from coordinator.metadata.zookeeper_terms import ROOT
from tests.metadata.backends import Backend, run
from tests.support.zookeeper import Server, secure_server, zookeeper_servers

OURS = Credentials(user="rollart", password="one")
THEIRS = Credentials(user="rollart", password="another")


@pytest.fixture(scope="module")
def fresh_server() -> Iterator[str]:
    with zookeeper_servers(1) as (address,):
        yield address


async def opened(stack: AsyncExitStack, hosts: str, credentials: Credentials | None) -> ZooKeeperStore:
    store = await ZooKeeperStore.open(hosts, timeout_s=10.0, credentials=credentials)
    stack.push_async_callback(store.close)
    return store


def test_clients_with_the_same_credentials_share_entries_and_others_are_refused_at_once(fresh_server: str) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            first = await opened(stack, fresh_server, OURS)
            await first.create("/jobs/j/a", b"x")
            await first.multi([Create("/jobs/j/b", b"y")])
            second = await opened(stack, fresh_server, OURS)
            assert await second.get("/jobs/j/a") == Entry("/jobs/j/a", b"x", 0)
            assert await second.write("/jobs/j/b", b"z") == 1
            for stranger in (THEIRS, None):
                with pytest.raises(StoreError, match=f"{ROOT}: the entries there belong to.*store_credentials"):
                    await opened(stack, fresh_server, stranger)

    run(scenario())


def test_reading_and_changing_are_refused_where_an_entry_is_somebody_elses(servers: list[str], tmp_path: Path) -> None:
    """The root is anybody's here, as where clients without credentials came first; the entry is ours. (To take it away
    would be a right on its parent.)"""

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            await opened(stack, servers[0], None)
            path = Backend("embedded", tmp_path).job.replace("/jobs/", "/guarded-")
            await (await opened(stack, servers[0], OURS)).create(path, b"x")
            for stranger in (THEIRS, None):
                store = await opened(stack, servers[0], stranger)
                await assert_shut_out(store, path)

    async def assert_shut_out(store: MetadataStore, path: str) -> None:
        for call in (store.get(path), store.children(path), store.write(path, b""), store.create(f"{path}/new", b"")):
            with pytest.raises(StoreError, match=f"{path}.*other store credentials"):
                await call
        with pytest.raises(StoreError, match=f"{path}.*other store credentials"):
            await store.multi([Create(f"{path[:-1]}-beside", b""), Write(path, b"")])
        assert await store.get(f"{path[:-1]}-beside") is None

    run(scenario())


# ---- TLS -------------------------------------------------------------------------------------------------------------


class Authority:
    """Signs certificates with openssl."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir()
        self.certificate = directory / "ca.pem"
        self._key = directory / "ca.key"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
            *("-subj", "/CN=authority", "-keyout", self._key, "-out", self.certificate),
        )

    def sign(self, name: str, address: str = "IP:127.0.0.1") -> tuple[Path, Path]:
        """Certificate and key."""
        certificate, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        request = self._directory / f"{name}.csr"
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}"),
            *("-addext", f"subjectAltName={address}", "-keyout", key, "-out", request),
        )
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key, "-days", "2"),
            *("-copy_extensions", "copyall", "-out", certificate),
        )
        return certificate, key


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], capture_output=True, timeout=60, check=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def secure(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    certificate, key = authority.sign("server")
    both = tmp_path_factory.mktemp("server") / "server.pem"
    both.write_text(key.read_text() + certificate.read_text())
    with secure_server(both, authority.certificate) as found:
        yield found


def test_a_client_with_a_certificate_works_over_tls_and_keeps_others_out(
    authority: Authority, secure: tuple[Server, str], tmp_path: Path
) -> None:
    server, address = secure
    certificate, key = authority.sign("client")
    file = tmp_path / "store.yaml"
    for source in (authority.certificate, certificate, key):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    file.write_text("tls: {ca: ca.pem, certificate: client.pem, key: client.key}\n")
    file.chmod(0o600)

    async def scenario() -> None:
        store = await open_store(
            f"zk://{address}", directory=tmp_path, timeout_s=20.0, credentials=read_credentials(file)
        )
        try:
            await store.create("/jobs/secure/a", b"x")
            assert await store.write("/jobs/secure/a", b"y", expected=0) == 1
            assert await store.get("/jobs/secure/a") == Entry("/jobs/secure/a", b"y", 1)
            # The same server's plain port: whoever shows no certificate is not who made the entries.
            with pytest.raises(StoreError, match="other store credentials"):
                await open_store(f"zk://{server.address}", directory=tmp_path, timeout_s=10.0)
        finally:
            await store.close()

    run(scenario())


def test_tls_refuses_strangers_on_either_side(authority: Authority, secure: tuple[Server, str], tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")

    async def scenario() -> None:
        for tls in (
            Tls(str(authority.certificate)),  # shows no certificate
            Tls(str(authority.certificate), *map(str, other.sign("stranger"))),  # one that the server does not trust
            Tls(str(other.certificate), *map(str, authority.sign("deceived"))),  # does not trust the server
        ):
            with pytest.raises(StoreTimeout, match="no session within"):
                await ZooKeeperStore.open(secure[1], timeout_s=1.5, credentials=Credentials(tls=tls))
        with pytest.raises(StoreTimeout, match="expects TLS needs store credentials"):
            await ZooKeeperStore.open(secure[1], timeout_s=1.5)

    run(scenario())


# ---- the file --------------------------------------------------------------------------------------------------------


def test_the_file_names_user_and_certificates_relative_to_itself(tmp_path: Path) -> None:
    file = tmp_path / "store.yaml"
    file.write_text("user: rollart\npassword: correct horse\ntls: {ca: ca.pem}\n")
    file.chmod(0o600)
    (tmp_path / "ca.pem").write_text("")
    assert read_credentials(file) == Credentials("rollart", "correct horse", Tls(str(tmp_path / "ca.pem")))


@pytest.mark.parametrize(
    ("text", "mode", "expected"),
    [
        ("user: a\npassword: b\n", 0o644, "open to others .mode 644.; run chmod 600"),
        ("user: a\n", 0o600, "user .* and password, both or none"),
        ("user: 'a:b'\npassword: c\n", 0o600, "without a colon"),
        ("usr: a\n", 0o600, "`usr`"),
        ("{}\n", 0o600, "found neither"),
        ("tls: {ca: nowhere.pem}\n", 0o600, "tls.ca: no file .*nowhere.pem"),
        ("tls: {ca: store.yaml, key: store.yaml}\n", 0o600, "tls.certificate and tls.key, both or none"),
        ("user: [\n", 0o600, "store.yaml"),
    ],
)
def test_a_file_that_cannot_be_used_says_what_to_change(tmp_path: Path, text: str, mode: int, expected: str) -> None:
    file = tmp_path / "store.yaml"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(CredentialsError, match=expected):
        read_credentials(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match=r"nowhere.yaml: cannot be read: No such file"):
        read_credentials(tmp_path / "nowhere.yaml")
