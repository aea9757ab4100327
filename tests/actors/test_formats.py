"""What cannot be read is refused by one line: what was expected, what was found, where, and what to do."""

from __future__ import annotations

import pytest

from actors.formats import Format, FormatRefused
from actors.version import VERSION

LETTER = Format("letter", 4, oldest=2)


@pytest.mark.parametrize("format_", [2, 3, 4])
def test_what_is_known_is_read_as_what_it_is(format_: int) -> None:
    assert LETTER.check(format_, "box") == format_


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (5, "a letter of format 5, of newer software; this software ({}) reads formats 2 to 4: use that, or upgrade"),
        (1, "a letter of format 1, of older software; this software ({}) reads formats 2 to 4: use that"),
        (None, "a letter that says no format (found None); this software ({}) reads formats 2 to 4: it is damaged"),
        ("4", "a letter that says no format (found '4'); this software ({}) reads formats 2 to 4: it is damaged"),
    ],
)
def test_all_else_is_refused_by_one_line(found: object, said: str) -> None:
    with pytest.raises(FormatRefused) as caught:
        LETTER.check(found, "box/17")
    assert str(caught.value).startswith(f"box/17: {said.format(VERSION)}")
    assert "\n" not in str(caught.value)


def test_one_format_alone_is_not_called_several() -> None:
    with pytest.raises(FormatRefused, match=r"reads format 1: use that, or upgrade this$"):
        Format("letter", 1, oldest=1).check(2, "box")
