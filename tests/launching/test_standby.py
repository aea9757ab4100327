"""The standby coordinator beside a spare, played by small shell scripts: when it is started again, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from coordinator.launching import standby
from coordinator.launching.standby import Standby

LIMIT_S = 60.0


def beside(directory: Path, script: str, scenario: Callable[[Standby], Awaitable[None]]) -> list[str]:
    """What the script said, run as a standby through a scenario."""
    (directory / "logs").mkdir()

    async def main() -> None:
        child = Standby("127.0.0.1", None)
        child._words = ["sh", "-c", script]
        async with asyncio.timeout(LIMIT_S):
            child.start(directory)
            await scenario(child)
            await child.stop()

    asyncio.run(main())
    return (directory / "logs" / "standby.out").read_text().split()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (a file that another process writes)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("status", "times"), [(0, 1), (130, 1), (75, 4), (76, 4), (1, 4)])
def test_one_that_has_nothing_more_to_do_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, times: int
) -> None:
    monkeypatch.setattr(standby, "AGAIN_S", 0.01)

    async def to_the_end(child: Standby) -> None:
        assert child._keeping is not None
        await child._keeping
        assert child.pid == 0

    assert beside(tmp_path, f"echo began; exit {status}", to_the_end) == ["began"] * times


def test_it_is_asked_to_end_once_however_often_it_is_stopped(tmp_path: Path) -> None:
    """A second signal would insist, in the middle of a checkpoint."""

    async def stopped_twice(child: Standby) -> None:
        out = tmp_path / "logs" / "standby.out"
        await until(lambda: out.exists() and "began" in out.read_text())
        assert child.pid > 0
        await asyncio.gather(child.stop(), child.stop(grace_s=5.0))

    script = "trap 'echo asked; sleep 0.3; echo saved; exit 130' TERM; echo began; while :; do sleep 0.02; done"
    assert beside(tmp_path, script, stopped_twice) == ["began", "asked", "saved"]


def test_one_whose_run_is_over_ends_by_itself(tmp_path: Path) -> None:
    async def over(child: Standby) -> None:
        await until(lambda: child.pid > 0)
        await child.stop(grace_s=LIMIT_S)

    assert beside(tmp_path, "trap 'echo asked' TERM; sleep 0.3; echo over", over) == ["over"]


def test_a_second_order_starts_no_second_one(tmp_path: Path) -> None:
    async def twice(child: Standby) -> None:
        child.start(tmp_path)
        await asyncio.sleep(0.3)

    assert beside(tmp_path, "echo began; sleep 0.1", twice) == ["began"]
