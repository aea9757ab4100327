"""What every store refuses, and how it says so: the same rules and messages, whichever store is behind the protocol."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from coordinator.metadata.protocol import (
    MAX_VALUE_BYTES,
    Check,
    CheckFailed,
    Create,
    Delete,
    EntryExists,
    HasChildren,
    NoEntry,
    Operation,
    Refused,
    StoreError,
    StoreTimeout,
    VersionMismatch,
    Write,
)

MAX_MULTI_BYTES = 512 * 1024  # one ZooKeeper request must stay below its 1 MB buffer (jute.maxbuffer)

# Control characters, and what ZooKeeper refuses above the basic planes' letters (surrogates, private use, specials).
_FORBIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\U0010ffff]")


def check_path(path: str) -> None:
    """Raises ``Refused`` unless ``path`` is ``/`` or ``/name/name/...``."""
    if path == "/":
        return
    if not path.startswith("/"):
        raise Refused(f"{path!r}: expected an absolute path such as /jobs/j1/nodes/proxy-0")
    for name in path[1:].split("/"):
        if not name or name in {".", ".."} or _FORBIDDEN.search(name):
            raise Refused(
                f"{path!r}: {name!r} is not a name; expected names of printable characters between single slashes, "
                "and none at the end"
            )


def check_changed_path(path: str) -> None:
    """As ``check_path``, for a path that is to be created, written or deleted."""
    check_path(path)
    if path == "/":
        raise Refused("/: the root is always there and holds no value; name an entry below it")


def check_value(path: str, value: bytes) -> None:
    if len(value) > MAX_VALUE_BYTES:
        raise Refused(
            f"{path}: a value of {len(value)} bytes; expected at most {MAX_VALUE_BYTES} (the store holds small, slow "
            "facts; send bulk data over the bus)"
        )


def check_expected(path: str, expected: int | None) -> None:
    if expected is not None and expected < 0:
        raise Refused(f"{path}: expected version {expected}; versions start at 0 (leave it out to match any)")


def check_operations(operations: Sequence[Operation]) -> None:
    """Every check of a ``multi`` that needs no look into the store."""
    total = 0
    for operation in operations:
        check_changed_path(operation.path)
        if isinstance(operation, Create | Write):
            check_value(operation.path, operation.value)
            total += len(operation.value)
        if isinstance(operation, Write | Delete | Check):
            check_expected(operation.path, operation.expected)
    if total > MAX_MULTI_BYTES:
        raise Refused(f"multi: values of {total} bytes in all; expected at most {MAX_MULTI_BYTES}; split it")


def parent_of(path: str) -> str:
    """``/a`` for ``/a/b``, ``/`` for ``/a``."""
    return path.rpartition("/")[0] or "/"


def ancestors_of(path: str) -> list[str]:
    """Those that a path needs, outermost first, without the root: ``/a``, ``/a/b`` for ``/a/b/c``."""
    names = path[1:].split("/")[:-1]
    return ["/" + "/".join(names[: depth + 1]) for depth in range(len(names))]


def child_of(parent: str, name: str) -> str:
    return f"/{name}" if parent == "/" else f"{parent}/{name}"


def no_entry(path: str) -> NoEntry:
    return NoEntry(f"{path}: nothing is there; expected an entry (create it first, or somebody deleted it)")


def entry_exists(path: str) -> EntryExists:
    return EntryExists(f"{path}: an entry is there already; expected none")


def version_mismatch(path: str, expected: int, found: int | None = None) -> VersionMismatch:
    other = "another" if found is None else str(found)
    return VersionMismatch(f"{path}: expected version {expected}, found {other}; read it again and decide anew")


def check_failed(path: str, expected: int, found: int | None = None) -> CheckFailed:
    other = "another or none" if found is None else str(found)
    return CheckFailed(f"{path}: checked for version {expected}, found {other}; nothing was changed", path)


def has_children(path: str) -> HasChildren:
    return HasChildren(f"{path}: entries lie below it; delete those first")


def ephemeral_parent(path: str) -> Refused:
    return Refused(f"{path}: an entry above it is ephemeral, and those have no children")


def not_ours(path: str) -> StoreError:
    return StoreError(
        f"{path}: the entries there belong to a client with other store credentials; name the file that their owner "
        "uses (coordinator.store_credentials)"
    )


def closed(store: str) -> Refused:
    return Refused(f"the metadata store ({store}) was closed by this client; open it again")


@asynccontextmanager
async def within(timeout_s: float, store: str, doing: str) -> AsyncIterator[None]:
    """The block ends by then or raises ``StoreTimeout``."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise timed_out(store, doing, timeout_s) from None


def timed_out(store: str, doing: str, timeout_s: float) -> StoreTimeout:
    return StoreTimeout(
        f"the metadata store ({store}) did not answer {doing} within {timeout_s:g} s; it may have taken effect or not"
    )
