"""Flame graphs: places worked out by hand, read back with an XML parser."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from hwprobe.tracing.flamegraph import MARGIN, WIDTH, boxes, flame_graph, tree
from hwprobe.tracing.folded import ASLEEP, fold, from_text, innermost, ordered, to_text

SVG = "{http://www.w3.org/2000/svg}"
STACKS = {"main;read": 3, "main;work;add": 4, "main": 1, "idle": 2}


def rectangles(svg: str) -> dict[str, tuple[float, float, float]]:
    """Title -> x, y, width."""
    root = ElementTree.fromstring(svg)
    found = {}
    for group in root.iter(f"{SVG}g"):
        title, rect = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        if title is not None and rect is not None:
            found[title.text or ""] = (float(rect.attrib["x"]), float(rect.attrib["y"]), float(rect.attrib["width"]))
    return found


def test_a_frame_is_as_wide_as_its_share_and_stands_on_its_caller() -> None:
    """Ten samples: idle 2 from the left, then main with 8, of which read has the first 3 and work the next 4."""
    found = rectangles(flame_graph(STACKS, "title", "samples"))
    inner = WIDTH - 2 * MARGIN
    places = {
        title.split(" ")[0]: (round((x - MARGIN) / inner, 4), round(width / inner, 4))
        for title, (x, _, width) in found.items()
    }
    assert places == {
        "all": (0.0, 1.0),
        "idle": (0.0, 0.2),
        "main": (0.2, 0.8),
        "read": (0.2, 0.3),
        "work": (0.5, 0.4),
        "add": (0.5, 0.4),
    }
    rows = {title.split(" ")[0]: y for title, (_, y, _) in found.items()}
    assert rows["all"] > rows["main"] == rows["idle"] > rows["read"] == rows["work"] > rows["add"]
    assert "main (8 samples, 80.00%)" in found


def test_microseconds_are_told_as_milliseconds() -> None:
    assert "wait (1,234.5 ms, 100.00%)" in rectangles(flame_graph({"wait": 1_234_500}, "title", "us"))


def test_a_frame_too_narrow_to_see_is_left_out_and_its_caller_keeps_its_width() -> None:
    found = rectangles(flame_graph({"main;wide": 999_999, "main;narrow": 1}, "title", "samples"))
    assert not [title for title in found if title.startswith("narrow")]
    assert "main (1,000,000 samples, 100.00%)" in found


def test_names_are_text_whatever_they_hold() -> None:
    name = "std::map<int, char>::operator[]&\"'\x00]]></script>"
    svg = flame_graph({name: 1}, name, "samples")
    (title,) = [title for title in rectangles(svg) if title.startswith("std")]
    assert title == "std::map<int, char>::operator[]&\"'?]]></script> (1 samples, 100.00%)"


def test_nothing_recorded_is_a_graph_that_says_so() -> None:
    svg = flame_graph({}, "title", "samples")
    assert rectangles(svg) == {}
    assert "nothing was recorded" in svg


def test_it_needs_nothing_from_elsewhere() -> None:
    svg = flame_graph(STACKS, "title", "samples").replace("http://www.w3.org/2000/svg", "")
    assert "http" not in svg
    assert "src=" not in svg


def test_equal_stacks_give_equal_files() -> None:
    turned = dict(reversed(STACKS.items()))
    assert flame_graph(STACKS, "title", "samples") == flame_graph(turned, "title", "samples")


def test_deep_stacks_do_not_exhaust_the_interpreters_own() -> None:
    deep = ";".join(f"f{depth}" for depth in range(5000))
    assert max(box.depth for box in boxes(tree({deep: 1}))) == 5000


def test_folded_stacks_are_read_back_as_they_were_written() -> None:
    assert to_text(STACKS) == "main;work;add 4\nmain;read 3\nidle 2\nmain 1\n"
    assert from_text(to_text(STACKS)) == STACKS
    assert from_text("a b;c d 3\n\na b;c d 4\n") == {"a b;c d": 7}
    with pytest.raises(ValueError, match="expected 'frame;frame;frame 12', found 'no weight'"):
        from_text("no weight")


def test_a_frame_cannot_break_a_stack_apart() -> None:
    assert fold(["python", "a;b", "line\nbreak", ""]) == "python;a:b;line break"
    assert fold([]) == "(nothing)"


def test_a_table_shows_who_and_the_innermost_frames() -> None:
    assert innermost("p;a;b;c;d", 2, 80) == "p > .. > c > d"
    assert innermost("p;a;b", 2, 80) == "p > a > b"
    assert innermost("p;long name;another", 2, 12) == "p > .. > another"
    assert innermost("p", 2, 80) == "p"


def test_what_did_nothing_at_all_comes_last() -> None:
    stacks = {f"p;{ASLEEP};poll": 100, "p;read": 1, "p;write": 2}
    assert [weight for _, weight in ordered(stacks)] == [2, 1, 100]
