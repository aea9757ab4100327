"""The comparison with other libraries says nothing of ours without a test, and nothing of theirs without a source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "comparison.md").read_text()
TABLES, _, SOURCES = TEXT.partition("## Sources")
PEERS = ["Thespian", "Pykka", "xoscar", "Ray", "torchmonarch"]

NO_SOURCE = re.compile(
    r"no\b|not documented|nobody|nothing|none|all actors end|objects by reference|by reference|threads"
)
"""What may be said of others without one: that something was not found, and what threads in one process come to."""


def rows(table: str) -> list[list[str]]:
    """Cells of all rows of tables with so-headed columns."""
    found, inside = [], False
    for line in table.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if not line.startswith("|"):
            inside = False
        elif cells == ["what", "here", "test", *PEERS]:
            inside = True
        elif inside and not set(line) <= set("|-"):
            found.append(cells)
    return found


def functions_of(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, functions)}


def keys(text: str) -> set[str]:
    """Of sources that are referred to."""
    return {key.strip() for group in re.findall(r"\[([TPXRM]\d+(?:, [TPXRM]\d+)*)\]", text) for key in group.split(",")}


def test_there_is_something_to_check() -> None:
    assert len(rows(TABLES)) > 30
    assert all(len(row) == 3 + len(PEERS) for row in rows(TABLES))


def test_each_claim_has_a_test_that_exists() -> None:
    missing = []
    for what, here, test, *_ in rows(TABLES):
        named = re.fullmatch(r"`(\S+\.py)::(test_\w+)`", test)
        if not here or named is None or named[2] not in functions_of(ROOT / "tests" / named[1]):
            missing.append(f"{what}: {test}")
    assert missing == []


def test_what_is_said_of_others_has_a_source() -> None:
    bare = [
        f"{row[0]}, {peer}: {cell}"
        for row in rows(TABLES)
        for peer, cell in zip(PEERS, row[3:], strict=True)
        if not keys(cell) and not NO_SOURCE.match(cell)
    ]
    assert bare == []
    listed = set(re.findall(r"^- \[([TPXRM]\d+)\]", SOURCES, re.MULTILINE))
    assert keys(TABLES) == listed
