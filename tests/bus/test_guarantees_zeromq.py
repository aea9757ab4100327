"""The guarantees of delivery over ZeroMQ, between processes that are killed and started again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.bus.history import Event, History
from tests.bus.life import Settings
from tests.bus.semantics import violations
from tests.bus.town import Town

NAMES = ["a", "b", "c"]


def play(directory: Path, seed: int, *, seconds: float, every_s: float, forgetful: bool = False) -> History:
    town = Town(directory, NAMES, seed, plain=Settings(forgetful=forgetful))
    try:
        town.begin()
        town.kill_now_and_then(seconds, every_s)
        return town.finish()
    finally:
        town.end()


def check(history: History) -> None:
    found = violations(history)
    kinds: Counter[type[Event]] = Counter(map(type, history.events))
    print({kind.__name__: count for kind, count in kinds.items()})
    if found:
        raise AssertionError("\n".join(found[:50]))


def test_processes_that_are_killed_and_started_again_keep_the_guarantees(tmp_path: Path) -> None:
    check(play(tmp_path, 1, seconds=3, every_s=0.7))


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(4))
def test_so_they_do_for_longer(tmp_path: Path, seed: int) -> None:
    check(play(tmp_path, seed, seconds=60, every_s=1.0))


@pytest.mark.deep
def test_a_fault_of_delivery_is_seen_here_too(tmp_path: Path) -> None:
    found = violations(play(tmp_path, 1, seconds=5, every_s=2.0, forgetful=True))
    assert any(text.startswith("once per incarnation") for text in found)
