"""Commands are found by their words, and what is wrong with them is said in one line."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from coordinator.shell import catalogue
from coordinator.shell.completing import Names, candidates
from coordinator.shell.connection import ShellError, Target, find, own_host
from coordinator.shell.tables import quantile, seconds, size, table


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("stats", "unknown command 'stats'; did you mean 'status'?"),
        ("set alhpa 2", "unknown command 'set alhpa 2'; did you mean 'set alpha'?"),
        ("set alpha", "expected: set alpha N; found nothing more"),
        ("set alpha 1 2", "expected: set alpha N; found '1 2'"),
        ("set alpha -1", "expected: set alpha N, with a whole number of 0 or more; found '-1'"),
        ("status now", "expected: status; found 'now'"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_with_what_was_expected(line: str, expected: str) -> None:
    with pytest.raises(ShellError) as error:
        catalogue.find(line.split())
    assert str(error.value) == expected


def test_optional_arguments_may_be_left_out() -> None:
    command, arguments = catalogue.find(["actors"])
    assert (command.name, arguments) == ("actors", [])
    command, arguments = catalogue.find(["actors", "control"])
    assert (command.name, arguments) == ("actors", ["control"])


def test_every_command_has_help_and_no_two_have_one_name() -> None:
    names = [command.name for command in catalogue.COMMANDS]
    assert len(set(names)) == len(names)
    assert all(command.purpose for command in catalogue.COMMANDS)


class Fixed(Names):
    """Names that are always the same."""

    def __init__(self) -> None:
        self._sources: dict[catalogue.Kind, Callable[[], Awaitable[dict[str, str]]]] = {"node": self._fixed}

    async def _fixed(self) -> dict[str, str]:
        return {"control": "coordinator", "engine-0": "of control", "engine-1": "of control"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sta", ["status"]),
        ("set ", ["alpha"]),
        ("set al", ["alpha"]),
        ("actors ", ["control", "engine-0", "engine-1"]),
        ("actors engine-", ["engine-0", "engine-1"]),
        ("actors control ", []),
        ("set alpha ", []),
        ("qu", ["queues", "quit"]),
    ],
)
async def test_completion_knows_commands_and_live_names(line: str, words: list[str]) -> None:
    found = await candidates(line, Fixed())
    offered = [word for word, _, _ in found]
    assert [word for word in offered if word in words] == words
    assert all(word.startswith("" if line.endswith(" ") else line.rsplit(maxsplit=1)[-1]) for word in offered)
    if line != "set ":
        assert offered == words


def test_an_address_must_look_like_one() -> None:
    with pytest.raises(ShellError, match=r"expected an address such as tcp://127\.0\.0\.1:4711, found 'localhost'"):
        find(Path("runs/latest"), "localhost")
    assert find(Path("runs/latest"), "tcp://10.0.0.1:7") == Target("tcp://10.0.0.1:7", "tcp://10.0.0.1:7")


def test_a_coordinator_on_loopback_is_answered_on_loopback() -> None:
    assert own_host("tcp://127.0.0.1:4711") == "127.0.0.1"
    assert own_host("tcp://localhost:4711") == "127.0.0.1"


def test_columns_line_up_with_numbers_to_the_right() -> None:
    assert table(("name", "count"), [("a", 5), ("long", 100)], nothing="none").splitlines() == [
        "name  count",
        "a         5",
        "long    100",
    ]
    assert table(("name",), [], nothing="there is none") == "there is none"


def test_numbers_read() -> None:
    assert [seconds(value) for value in (0.00083, 0.012, 4.2, None)] == ["830 us", "12 ms", "4.2 s", "-"]
    assert [size(value) for value in (12, 1536, 3 * 2**20, 2.5 * 2**30)] == ["12 B", "1.5 KiB", "3 MiB", "2.5 GiB"]
    assert quantile([0, 98, 1, 1], (0.001, 0.01, 0.1), 0.5) == "<10 ms"
    assert quantile([0, 98, 1, 1], (0.001, 0.01, 0.1), 0.99) == "<100 ms"
    assert quantile([0, 98, 1, 1], (0.001, 0.01, 0.1), 1.0) == ">100 ms"
    assert quantile([0, 0, 0, 0], (0.001, 0.01, 0.1), 0.5) == "-"
