"""Child processes: how they start, how they end, and what is said about it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import actors.core.process
from actors.core.process import PACKAGE_ROOT, Child, start_child
from tests.actors.support import alive, descriptors, until

MODULE = "tests.actors.children"


@asynccontextmanager
async def child(tmp_path: Path, *arguments: str, environment: dict[str, str] | None = None) -> AsyncIterator[Child]:
    """Killed at the end, whatever happens."""
    log_path = tmp_path / "logs" / "child.out"
    started = await start_child("child", MODULE, list(arguments), log_path=log_path, environment=environment)
    try:
        yield started
    finally:
        started.kill()
        await started.stop()


async def end_of(started: Child) -> str:
    """What is said about its death."""
    reasons: list[str] = []
    async with asyncio.timeout(20):
        await started.watch(reasons.append)
    (reason,) = reasons
    return reason


async def pid_in(file: Path) -> int:
    await until(file.exists)
    return read_pid(file)


def read_pid(file: Path) -> int:
    return int(file.read_text())


# ---- last words ------------------------------------------------------------------------------------------------------


async def test_a_death_is_reported_with_exit_status_and_last_words(tmp_path: Path) -> None:
    async with child(tmp_path, "say", "3", "first line", "it was the disk") as started:
        reason = await end_of(started)
    log = tmp_path / "logs" / "child.out"
    assert reason == f"process child (pid {started.pid}) ended: exit status 3; last line of {log}: it was the disk"


async def test_a_silent_death_does_not_borrow_the_last_words_of_a_predecessor(tmp_path: Path) -> None:
    async with child(tmp_path, "say", "3", "it was the disk") as started:
        await end_of(started)
    async with child(tmp_path, "signal", "9") as started:
        assert (await end_of(started)).endswith("ended: killed by SIGKILL")


async def test_last_words_are_found_at_the_end_of_a_long_log(tmp_path: Path) -> None:
    async with child(tmp_path, "say", "1", *["x" * 1000] * 100, "the end") as started:
        assert (await end_of(started)).endswith(": the end")


async def test_any_signal_has_a_name(tmp_path: Path) -> None:
    async with child(tmp_path, "signal", str(signal.SIGRTMIN + 3)) as started:
        assert f"killed by signal {signal.SIGRTMIN + 3}" in await end_of(started)


async def test_a_module_that_does_not_exist_is_a_death_with_a_reason(tmp_path: Path) -> None:
    started = await start_child("child", "tests.actors.nothing", [], log_path=tmp_path / "child.out")
    assert "No module named tests.actors.nothing" in await end_of(started)


# ---- stopping --------------------------------------------------------------------------------------------------------


async def test_a_child_that_is_asked_to_stop_is_not_reported_as_dead(tmp_path: Path) -> None:
    reasons: list[str] = []
    async with child(tmp_path, "sleep", str(tmp_path / "pid")) as started:
        watching = asyncio.create_task(started.watch(reasons.append))
        pid = await pid_in(tmp_path / "pid")
        assert pid == started.pid
        await started.stop()
        await started.stop()
        await watching
    assert reasons == []
    assert not alive(pid)


async def test_a_child_that_ignores_the_request_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.core.process, "STOP_GRACE_S", 0.2)
    async with child(tmp_path, "ignore", str(tmp_path / "pid")) as started:
        pid = await pid_in(tmp_path / "pid")
        await started.stop()
        assert not started.running
        assert not alive(pid)


async def test_a_stopped_process_can_be_killed(tmp_path: Path) -> None:
    async with child(tmp_path, "sleep", str(tmp_path / "pid")) as started:
        os.kill(await pid_in(tmp_path / "pid"), signal.SIGSTOP)
        started.kill()
        assert "killed by SIGKILL" in await end_of(started)


@pytest.mark.parametrize("how", ["killed", "stopped", "dies by itself"])
async def test_what_a_child_started_dies_with_it(tmp_path: Path, how: str) -> None:
    async with child(tmp_path, "with a child of its own", str(tmp_path / "pid")) as started:
        grandchild = await pid_in(tmp_path / "pid")
        assert alive(grandchild)
        if how == "killed":
            started.kill()
        elif how == "stopped":
            await started.stop()
        else:
            os.kill(started.pid, signal.SIGKILL)
            await end_of(started)
        await until(lambda: not alive(grandchild))


async def test_a_child_that_was_stopped_is_known_to_stand_still(tmp_path: Path) -> None:
    async with child(tmp_path, "sleep", str(tmp_path / "pid")) as started:
        await pid_in(tmp_path / "pid")
        assert not started.stopped
        os.kill(started.pid, signal.SIGSTOP)
        await until(lambda: started.stopped)
        os.kill(started.pid, signal.SIGCONT)
        await until(lambda: not started.stopped)


# ---- the parent's end ------------------------------------------------------------------------------------------------


def start_parent(child_file: Path, how: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", MODULE, "parent", str(child_file), how], cwd=PACKAGE_ROOT)


async def test_a_child_dies_with_a_killed_parent(tmp_path: Path) -> None:
    with start_parent(tmp_path / "pid", "wait") as parent:
        orphan = await pid_in(tmp_path / "pid")
        assert alive(orphan)
        parent.send_signal(signal.SIGKILL)
        parent.wait(20)
    await until(lambda: not alive(orphan))


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
async def test_a_child_that_still_imports_dies_with_a_killed_parent(tmp_path: Path, *, stopped: bool) -> None:
    with start_parent(tmp_path / "pid", "wait for an import") as parent:
        orphan = await pid_in(tmp_path / "pid")
        if stopped:
            os.kill(orphan, signal.SIGSTOP)
        parent.send_signal(signal.SIGKILL)
        parent.wait(20)
    await until(lambda: not alive(orphan))


async def test_a_child_whose_parent_was_gone_before_it_could_ask_to_die_with_it_ends_by_itself(tmp_path: Path) -> None:
    """The parent ends at once; its child finds another one in its place."""
    settings = {**os.environ, "ROLLART_PARENT": "1", "PYTHONPATH": str(PACKAGE_ROOT)}
    arguments = [sys.executable, "-m", MODULE, "sleep", str(tmp_path / "pid")]
    status = await asyncio.to_thread(subprocess.run, arguments, env=settings, timeout=20, check=False)
    assert status.returncode == 1
    assert not (tmp_path / "pid").exists()


# ---- surroundings ----------------------------------------------------------------------------------------------------


async def report(tmp_path: Path, environment: dict[str, str] | None = None) -> dict[str, object]:
    async with child(tmp_path, "report", environment=environment) as started:
        await end_of(started)
        facts: dict[str, object] = json.loads((tmp_path / "logs" / "child.out").read_text())
        assert facts["pid"] == started.pid
        return facts


async def test_a_child_has_a_session_of_its_own_so_that_a_terminals_ctrl_c_does_not_reach_it(tmp_path: Path) -> None:
    facts = await report(tmp_path)
    assert facts["session"] == facts["pid"]
    assert facts["session"] != os.getsid(0)


async def test_a_child_imports_from_where_its_parent_does_not_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    (tmp_path / "actors").mkdir()
    (tmp_path / "actors" / "__init__.py").write_text("raise ImportError('a foreign package')")
    facts = await report(tmp_path)
    path = facts["path"]
    assert isinstance(path, list)
    assert path[:2] == [str(PACKAGE_ROOT), "/somewhere/else"]
    assert str(tmp_path) not in path
    assert "" not in path


async def test_a_child_gets_the_parents_environment_and_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROM_PARENT", "yes")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    facts = await report(tmp_path, {"OMP_NUM_THREADS": "1"})
    environment = facts["environment"]
    assert isinstance(environment, dict)
    assert (environment["FROM_PARENT"], environment["OMP_NUM_THREADS"]) == ("yes", "1")
    assert environment["ROLLART_PARENT"] == str(os.getpid())


async def test_children_leave_no_descriptor_behind(tmp_path: Path) -> None:
    async def live() -> None:
        async with child(tmp_path, "say", "0", "x") as started:
            await end_of(started)

    await live()
    before = descriptors()
    for _ in range(3):
        await live()
    assert descriptors() <= before
