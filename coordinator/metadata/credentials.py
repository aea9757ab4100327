"""With what a client shows the ZooKeeper servers who it is: a file of its own, never a line of the job.

Invariant: what a client with credentials makes, only clients with the same ones can read or change (ZooKeeper's ACL
``auth``: everything for whoever made it), and the file lets nobody else read them.

    user: rollart              digest authentication: the user and password that all clients of the store share
    password: correct horse
    tls:                       where the servers have a ``secureClientPort``; paths are relative to this file
      ca: ca.pem               who signed the servers' certificates
      certificate: client.pem  what servers that ask for it are shown; with ``key``
      key: client.key

The digest travels in plain text without TLS: beyond one machine or a network of one's own use both.
"""

from __future__ import annotations

from pathlib import Path

import msgspec


class CredentialsError(ValueError):
    """A credentials file that cannot be used; the message says what to change."""


class Tls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Paths of PEM files."""

    ca: str
    certificate: str = ""
    key: str = ""


class Credentials(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file holds."""

    user: str = ""
    password: str = ""
    tls: Tls | None = None

    @property
    def names_somebody(self) -> bool:
        """Whether the servers learn who the client is, and so can keep others out."""
        return bool(self.user) or (self.tls is not None and bool(self.tls.certificate))


def read_credentials(file: Path) -> Credentials:
    """Raises ``CredentialsError`` where the file is missing, malformed, open to others or names missing files."""
    try:
        mode = file.stat().st_mode
        text = file.read_bytes()
    except OSError as error:
        raise CredentialsError(f"store credentials {file}: cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise CredentialsError(f"store credentials {file}: open to others (mode {mode & 0o777:o}); run chmod 600 on it")
    try:
        found = msgspec.yaml.decode(text, type=Credentials)
    except msgspec.MsgspecError as error:
        raise CredentialsError(f"store credentials {file}: {' '.join(str(error).split())}") from None
    return _checked(file, found)


def named(file: str | None) -> Credentials | None:
    """Those of a job's setting, which may name none."""
    return None if file is None else read_credentials(Path(file))


def _checked(file: Path, found: Credentials) -> Credentials:
    if bool(found.user) != bool(found.password) or ":" in found.user:
        raise CredentialsError(f"store credentials {file}: expected user (without a colon) and password, both or none")
    if not found.user and found.tls is None:
        raise CredentialsError(f"store credentials {file}: expected user and password, or tls, or both; found neither")
    if found.tls is None:
        return found
    tls = found.tls
    if bool(tls.certificate) != bool(tls.key):
        raise CredentialsError(f"store credentials {file}: expected tls.certificate and tls.key, both or none")
    at = {name: file.parent / path for name, path in msgspec.structs.asdict(tls).items() if path}
    for name, path in at.items():
        if not path.is_file():
            raise CredentialsError(f"store credentials {file}: tls.{name}: no file {path}")
    return msgspec.structs.replace(found, tls=Tls(**{name: str(path) for name, path in at.items()}))
