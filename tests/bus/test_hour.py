"""Minutes of real time under load with kills; ``python -m tests.bus.hour`` does so for an hour."""

from pathlib import Path

import pytest

from tests.bus.hour import LASTING, MORTAL, Hour


@pytest.mark.deep
def test_kills_under_load_lose_nothing_without_a_reason_and_leave_nothing_behind(tmp_path: Path) -> None:
    outcome = Hour(tmp_path, seed=1, chapter_s=12).run(minutes=2)
    assert outcome.violations == []
    assert outcome.chapters >= 4
    assert min(outcome.deaths, outcome.stops) >= 3
    assert {"reply", "end", "left", "RemoteError", "PeerRestarted"} <= outcome.ended.keys()
    assert min(outcome.happened[kind] for kind in ("Handled", "Taken", "Told", "Lost")) > 0
    others = len([*LASTING, *MORTAL]) - 1
    for first, last in ((held[0], held[-1]) for held in outcome.held.values()):
        assert last.unfinished == 0
        assert last.lent == 0
        assert last.actors == 1  # all links are gone
        assert last.answers <= others * 16
        assert last.connections <= 2 * others  # two lanes
        assert last.tasks <= first.tasks + others
        assert last.watches <= first.watches + others
        assert last.objects <= 1.1 * first.objects
