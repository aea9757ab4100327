"""The auditor refuses books that do not add up: a check that finds nothing wrong must be able to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.audit import BooksDoNotAddUp, audited


def line(event: str, *tickets: str, **more: Any) -> dict[str, Any]:
    return {"event": event, "tickets": list(tickets), **more}


A, STORED = line("admitted", "a"), line("stored", "a", version=0)
TRAINED = line("trained", "a", version=1)


def test_a_whole_story_is_accepted() -> None:
    audit = audited(
        [
            *(line("admitted", id_) for id_ in "abcd"),
            *(line("stored", id_, version=0) for id_ in "ab"),
            line("trained", "a", version=1),
            line("lost", "c", reason="env_failed"),
            line("resumed", "b", version=0),
            line("lost", "a", reason="rolled_back"),
            line("lost", "d", reason="interrupted"),
            line("trained", "b", version=1),
        ]
    )
    assert audit.trained == {"b": 1}
    assert audit.lost == {"env_failed": 1, "rolled_back": 1, "interrupted": 1}
    assert (audit.open("admitted"), audit.open("stored"), audit.resumes) == ([], [], 1)


@pytest.mark.parametrize(
    "lines",
    [
        [A, A],
        [A, TRAINED],
        [A, STORED, TRAINED, line("trained", "a", version=2)],
        [A, STORED, line("trained", "a", version=3)],
        [A, STORED, TRAINED, line("lost", "a", reason="x")],
        [A, line("lost", "a", reason="")],
        [line("stored", "a", version=0)],
        [A, STORED, line("resumed", version=0)],
        [A, STORED, TRAINED, line("resumed", version=0), line("admitted", "b")],
    ],
    ids=[
        "admitted-twice",
        "trained-unstored",
        "trained-twice",
        "a-version-skipped",
        "lost-after-training",
        "no-reason",
        "never-admitted",
        "forgotten-by-a-resume",
        "a-rolled-back-training-forgotten",
    ],
)
def test_books_that_do_not_add_up_are_refused(lines: list[dict[str, Any]]) -> None:
    with pytest.raises(BooksDoNotAddUp):
        audited(lines)
