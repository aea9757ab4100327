"""How entries, operations and refusals look to a ZooKeeper server: paths below ``ROOT``, kazoo's exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kazoo.exceptions import (
    BadVersionError,
    NoAuthError,
    NoChildrenForEphemeralsError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
)
from kazoo.security import CREATOR_ALL_ACL

from coordinator.metadata import checks
from coordinator.metadata.credentials import Credentials
from coordinator.metadata.protocol import Check, Create, Delete, Done, Operation, StoreError, Write

ROOT = "/rollart"
_MEANINGS: dict[type[Exception], Callable[[str], StoreError]] = {
    NodeExistsError: checks.entry_exists,
    NoNodeError: checks.no_entry,
    NotEmptyError: checks.has_children,
    NoChildrenForEphemeralsError: checks.ephemeral_parent,
    NoAuthError: checks.not_ours,
}


def presented(credentials: Credentials | None) -> dict[str, Any]:
    """kazoo's arguments."""
    arguments: dict[str, Any] = {}
    if credentials is None:
        return arguments
    if credentials.names_somebody:
        arguments["default_acl"] = CREATOR_ALL_ACL
    if credentials.user:
        arguments["auth_data"] = [("digest", f"{credentials.user}:{credentials.password}")]
    if credentials.tls is not None:
        tls = credentials.tls
        arguments |= {"use_ssl": True, "check_hostname": True, "ca": tls.ca}
        arguments |= {"certfile": tls.certificate, "keyfile": tls.key} if tls.certificate else {}
    return arguments


def full(path: str) -> str:
    return ROOT if path == "/" else ROOT + path


def version_of(expected: int | None) -> int:
    return -1 if expected is None else expected


def add_to(transaction: Any, operation: Operation) -> None:
    path = full(operation.path)
    if isinstance(operation, Create):
        transaction.create(path, operation.value, ephemeral=operation.ephemeral, sequence=operation.sequential)
    elif isinstance(operation, Write):
        transaction.set_data(path, operation.value, version_of(operation.expected))
    elif isinstance(operation, Delete):
        transaction.delete(path, version_of(operation.expected))
    else:
        transaction.check(path, operation.expected)


def done_by(operation: Operation, result: Any) -> Done:
    """What a transaction's result says."""
    if isinstance(operation, Create):
        return str(result)[len(ROOT) :]
    return int(result.version) if isinstance(operation, Write) else None


def refusal_of(operation: Operation, error: Exception) -> StoreError:
    if isinstance(operation, Check) and isinstance(error, BadVersionError | NoNodeError):
        return checks.check_failed(operation.path, operation.expected)
    return translated(error, operation.path, None if isinstance(operation, Create) else operation.expected)


def translated(error: Exception, path: str, expected: int | None = None) -> StoreError:
    if isinstance(error, BadVersionError) and expected is not None:
        return checks.version_mismatch(path, expected)
    meaning = _MEANINGS.get(type(error))
    if meaning is not None:
        return meaning(path)
    return StoreError(f"{path}: the ZooKeeper server refused: {type(error).__name__} {error}".rstrip())
