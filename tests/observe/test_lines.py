"""A file of records after a crash at any byte."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from coordinator.observe.lines import LineWriter, read_lines


class Item(msgspec.Struct):
    text: str


def decode(line: bytes) -> str:
    return msgspec.json.decode(line, type=Item).text


def test_records_come_back_in_order(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "a.jsonl")
    writer.write(Item("one"))
    writer.write_all([Item("two\nlines"), Item("three")])
    writer.close()
    assert read_lines(tmp_path / "a.jsonl", decode).records == ["one", "two\nlines", "three"]


def test_a_file_cut_at_any_byte_keeps_its_whole_lines_and_takes_new_ones(tmp_path: Path) -> None:
    lines = [b'{"text":"one"}\n', b'{"text":"\xc3\xa9"}\n', b'{"text":"three"}\n']
    whole = b"".join(lines)
    ends = [len(b"".join(lines[:count])) for count in range(4)]
    for cut in range(len(whole) + 1):
        path = tmp_path / f"{cut}.jsonl"
        path.write_bytes(whole[:cut])
        expected = ["one", "é", "three"][: sum(end <= cut for end in ends) - 1]
        assert read_lines(path, decode).records == expected
        writer = LineWriter(path)
        writer.write(Item("after"))
        writer.close()
        found = read_lines(path, decode)
        assert (found.records, found.unreadable) == ([*expected, "after"], 0)


def test_a_torn_line_longer_than_the_search_block_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_bytes(b'{"text":"one"}\n{"text":"' + b"x" * 200_000)
    LineWriter(path).close()
    assert path.read_bytes() == b'{"text":"one"}\n'


def test_unreadable_lines_are_counted_not_dropped_silently(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text":"one"}\n\0\0\0\n{"text":3}\n{"text":"two"}\n')
    found = read_lines(path, decode)
    assert (found.records, found.unreadable) == (["one", "two"], 2)


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "none.jsonl", decode).records == []


def test_a_closed_writer_refuses_by_name(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "a.jsonl")
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match=r"a\.jsonl: closed"):
        writer.write(Item("late"))


def test_a_lone_surrogate_is_written_as_its_escape(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "a.jsonl")
    writer.write(Item("bad \ud800 byte"))
    writer.close()
    assert read_lines(tmp_path / "a.jsonl", decode).records == ["bad \\ud800 byte"]
