"""What a run that is interrupted, or fails, waits for before it saves."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest

from coordinator import finishing
from coordinator.fate import Fate
from coordinator.finishing import Finish
from coordinator.interruption import Interruption
from coordinator.leadership import SOLE
from coordinator.observe.progress import PlainProgress


class SlowStep:
    """A pipeline whose trainer is in a step that ends when it is told."""

    can_save = True

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.saved = False

    @property
    def in_step(self) -> bool:
        return not self.ended.is_set()

    async def stop(self) -> None:
        """Nothing else is under way."""

    async def checkpoint(self) -> Path:
        assert self.ended.is_set()
        self.saved = True
        return Path("v00007")

    async def leave_step(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self.ended.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


def test_a_long_step_is_waited_for_so_that_it_can_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finishing, "STEP_GRACE_S", 0.01)

    async def main() -> tuple[bool, str]:
        words, pipeline = io.StringIO(), SlowStep()
        progress = PlainProgress(1, words)
        fate = Fate(Interruption(progress), SOLE)
        finish = Finish(pipeline, fate, progress, saves=True, resumed=None)  # type: ignore[arg-type]
        waiting = asyncio.create_task(finish.out_of_step())
        while "is finished first" not in words.getvalue():  # noqa: ASYNC110 (written by what is tested)
            await asyncio.sleep(0.01)
        assert not waiting.done()
        pipeline.ended.set()
        return await waiting, words.getvalue()

    left, words = asyncio.run(asyncio.wait_for(main(), 30.0))
    assert left
    assert "Ctrl-C again stops at once" in words


def test_a_run_that_fails_in_a_long_step_is_saved_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finishing, "STEP_GRACE_S", 0.5)

    async def main() -> tuple[bool, str]:
        words, pipeline = io.StringIO(), SlowStep()
        progress = PlainProgress(1, words)
        fate = Fate(Interruption(progress), SOLE)
        finish = Finish(pipeline, fate, progress, saves=True, resumed=None)  # type: ignore[arg-type]

        async def training() -> str:
            await asyncio.Event().wait()
            return "never"

        driving = asyncio.create_task(finish.drive(training()))
        fate.fail(OSError("the metadata store is gone"))
        while "is finished first" not in words.getvalue():  # noqa: ASYNC110 (written by what is tested)
            await asyncio.sleep(0.01)
        assert not pipeline.saved
        pipeline.ended.set()
        with pytest.raises(OSError, match="the metadata store is gone"):
            await driving
        return pipeline.saved, words.getvalue()

    saved, words = asyncio.run(asyncio.wait_for(main(), 30.0))
    assert saved
    assert "v00007" in words
