"""The embedded store's state in one SQLite file: every change is one durable transaction, or none of it happened.

Blocking and for one thread: ``embedded`` runs it off the event loop. Changes are returned beside the result, for the
watches. A parent that is made because a path needs it is an ordinary entry with an empty value.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from actors.formats import EMBEDDED_STORE, FormatRefused
from coordinator.metadata import checks
from coordinator.metadata.protocol import Change, Check, Create, Delete, Done, Entry, Operation, StoreError, Write
from coordinator.metadata.shard import Raw, restored_version

_SCHEMA = """
CREATE TABLE entries (
    path TEXT PRIMARY KEY,
    parent TEXT NOT NULL,
    value BLOB NOT NULL,
    version INTEGER NOT NULL DEFAULT 0,
    ephemeral INTEGER NOT NULL DEFAULT 0,
    next_number INTEGER NOT NULL DEFAULT 0  -- of the next sequential entry below this one
);
CREATE INDEX entries_by_parent ON entries (parent);
INSERT INTO entries (path, parent, value) VALUES ('/', '', x'');
"""


class Tables:
    """Raises the protocol's errors for what a caller did, ``sqlite3.Error`` for what the file or the disk did."""

    def __init__(self, file: Path, busy_timeout_s: float) -> None:
        # The file is opened on the thread that asks for it and used only there; sqlite3 checks that.
        self._connection = sqlite3.connect(file, timeout=busy_timeout_s, isolation_level=None)
        try:
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")  # a fact acknowledged survives a power cut
            self._make_schema(file)
            self.drop_ephemerals()  # whoever owned them is gone: only one store has the file open at a time
        except BaseException:
            self._connection.close()
            raise

    def _make_schema(self, file: Path) -> None:
        (found,) = self._connection.execute("PRAGMA user_version").fetchone()
        if found == 0:
            with self._transaction():
                for statement in _SCHEMA.split(";\n"):
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA user_version = {EMBEDDED_STORE.current}")
            return
        try:
            EMBEDDED_STORE.check(found, file)
        except FormatRefused as error:
            raise StoreError(f"{error}, or move the file away to start afresh") from None

    def get(self, path: str) -> Entry | None:
        row = self._connection.execute("SELECT value, version FROM entries WHERE path = ?", (path,)).fetchone()
        return None if row is None else Entry(path, row[0], row[1])

    def children(self, path: str) -> list[str]:
        rows = self._connection.execute("SELECT path FROM entries WHERE parent = ?", (path,))
        return sorted(child.rpartition("/")[2] for (child,) in rows)

    def create(self, path: str, value: bytes, ephemeral: bool, sequential: bool) -> tuple[str, list[Change]]:
        with self._transaction():
            return self._create(path, value, ephemeral, sequential)

    def write(self, path: str, value: bytes, expected: int | None) -> tuple[int, list[Change]]:
        with self._transaction():
            return self._update(path, value, expected), [Change("written", path)]

    def delete(self, path: str, expected: int | None) -> tuple[None, list[Change]]:
        with self._transaction():
            return None, [self._remove(path, expected)]

    def multi(self, operations: Sequence[Operation]) -> tuple[list[Done], list[Change]]:
        done: list[Done] = []
        changes: list[Change] = []
        with self._transaction():
            for operation in operations:
                result: Done = None
                if isinstance(operation, Create):
                    result, made = self._create(
                        operation.path, operation.value, operation.ephemeral, operation.sequential
                    )
                    changes += made
                elif isinstance(operation, Write):
                    result = self._update(operation.path, operation.value, operation.expected)
                    changes.append(Change("written", operation.path))
                elif isinstance(operation, Delete):
                    changes.append(self._remove(operation.path, operation.expected))
                else:
                    self._check(operation)
                done.append(result)
        return done, changes

    def inspect(self, path: str) -> Raw | None:
        row = self._connection.execute(
            "SELECT value, version, ephemeral, next_number FROM entries WHERE path = ?", (path,)
        ).fetchone()
        return None if row is None else Raw(path, row[0], row[1], "me" if row[2] else "", row[3])

    def restore(self, raw: Raw, guard: Check, ephemeral: bool) -> tuple[None, list[Change]]:
        with self._transaction():
            self._check(guard)
            found = self.get(raw.path)
            if found is None:
                changes = [*self._make_parents(raw.path), self._insert(raw.path, raw.value, ephemeral)]
                version = raw.version
            else:
                changes = [Change("written", raw.path)]
                version = restored_version(raw, found)
            self._connection.execute(
                "UPDATE entries SET value = ?, version = ? WHERE path = ?", (raw.value, version, raw.path)
            )
        return None, changes

    def raise_number(self, path: str, number: int, guard: Check) -> tuple[None, list[Change]]:
        with self._transaction():
            self._check(guard)
            self._connection.execute(
                "UPDATE entries SET next_number = max(next_number, ?) WHERE path = ?", (number, path)
            )
        return None, []

    def drop_ephemerals(self) -> None:
        self._connection.execute("DELETE FROM entries WHERE ephemeral")

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def _create(self, path: str, value: bytes, ephemeral: bool, sequential: bool) -> tuple[str, list[Change]]:
        changes = self._make_parents(path)
        if sequential:
            path += f"{self._take_number(checks.parent_of(path)):010d}"
        changes.append(self._insert(path, value, ephemeral))
        return path, changes

    def _check(self, check: Check) -> None:
        entry = self.get(check.path)
        if entry is None or entry.version != check.expected:
            raise checks.check_failed(check.path, check.expected, None if entry is None else entry.version)

    def _make_parents(self, path: str) -> list[Change]:
        changes = []
        for ancestor in checks.ancestors_of(path):
            row = self._connection.execute("SELECT ephemeral FROM entries WHERE path = ?", (ancestor,)).fetchone()
            if row is None:
                changes.append(self._insert(ancestor, b"", ephemeral=False))
            elif row[0]:
                raise checks.ephemeral_parent(path)
        return changes

    def _take_number(self, parent: str) -> int:
        statement = "UPDATE entries SET next_number = next_number + 1 WHERE path = ? RETURNING next_number - 1"
        return int(self._connection.execute(statement, (parent,)).fetchone()[0])

    def _insert(self, path: str, value: bytes, ephemeral: bool) -> Change:
        made = self._connection.execute(
            "INSERT INTO entries (path, parent, value, ephemeral) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (path, checks.parent_of(path), value, ephemeral),
        )
        if not made.rowcount:
            raise checks.entry_exists(path)
        return Change("created", path)

    def _update(self, path: str, value: bytes, expected: int | None) -> int:
        version = self._expect(path, expected) + 1
        self._connection.execute("UPDATE entries SET value = ?, version = ? WHERE path = ?", (value, version, path))
        return version

    def _remove(self, path: str, expected: int | None) -> Change:
        self._expect(path, expected)
        if self._connection.execute("SELECT 1 FROM entries WHERE parent = ? LIMIT 1", (path,)).fetchone():
            raise checks.has_children(path)
        self._connection.execute("DELETE FROM entries WHERE path = ?", (path,))
        return Change("deleted", path)

    def _expect(self, path: str, expected: int | None) -> int:
        entry = self.get(path)
        if entry is None:
            raise checks.no_entry(path)
        if expected is not None and entry.version != expected:
            raise checks.version_mismatch(path, expected, entry.version)
        return entry.version
