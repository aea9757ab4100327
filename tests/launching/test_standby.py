"""The standby coordinator beside a spare, played by small shell scripts: when it is started again, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from coordinator.launching import standby
from coordinator.launching.standby import Standby

LIMIT_S = 60.0


def beside(
    directory: Path,
    script: str,
    scenario: Callable[[Standby], Awaitable[None]],
    *,
    gave_up: Callable[[str], None] = pytest.fail,
) -> list[str]:
    """What the script said, run as a standby through a scenario; by default it must not be given up."""
    (directory / "logs").mkdir()

    async def main() -> None:
        child = Standby("127.0.0.1", None, gave_up)
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


async def to_the_end(child: Standby) -> None:
    assert child._keeping is not None
    await child._keeping
    assert child.pid == 0


@pytest.mark.parametrize("status", [0, 130])
def test_one_that_has_nothing_more_to_do_is_not_started_again(tmp_path: Path, status: int) -> None:
    assert beside(tmp_path, f"echo began; exit {status}", to_the_end) == ["began"]


@pytest.mark.parametrize(
    ("end", "how"),
    [("exit 75", "status 75"), ("exit 76", "status 76"), ("exit 1", "status 1"), ("kill -9 $$", "signal 9")],
)
def test_one_that_ends_again_and_again_is_given_up_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, how: str
) -> None:
    monkeypatch.setattr(standby, "AGAIN_S", 0.01)
    reasons: list[str] = []
    assert beside(tmp_path, f"echo began; {end}", to_the_end, gave_up=reasons.append) == ["began"] * 4
    out = tmp_path / "logs" / "standby.out"
    assert reasons == [f"it ended 4 times in a row, the last time with {how}; see {out}"]


def test_one_that_has_lasted_is_started_again_however_often_it_has_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "AGAIN_S", 0.01)
    monkeypatch.setattr(standby, "STEADY_S", 0.0)
    said = tmp_path / "logs" / "standby.out"
    script = f"echo began; test $(wc -l < {said}) -lt 7 && exit 1; exit 0"
    reasons: list[str] = []

    assert beside(tmp_path, script, to_the_end, gave_up=reasons.append) == ["began"] * 7
    assert reasons == []


def test_one_that_cannot_be_started_is_given_up_at_once(tmp_path: Path) -> None:
    reasons: list[str] = []

    async def to_the_end_of(child: Standby) -> None:
        child._words = [str(tmp_path / "nowhere")]
        await to_the_end(child)

    assert beside(tmp_path, "", to_the_end_of, gave_up=reasons.append) == []
    assert len(reasons) == 1
    assert reasons[0].startswith("it cannot be started: [Errno 2] No such file or directory")


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
