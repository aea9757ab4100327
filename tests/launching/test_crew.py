"""A crew of small shell scripts: what its status is, who is told of a signal, and that nobody is left."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.launching import crew
from coordinator.launching.crew import Crew, Part

UNTIL_EOF = "cat >/dev/null"  # as --stop-on-eof: ends with its standard input
UNTIL_TOLD = 'until [ -e "$TOLD" ]; do sleep 0.02; done'
READY = "echo 'env-1: env is ready for run r'"


def sh(name: str, script: str, *, leads: bool = False) -> Part:
    return Part(name, ["sh", "-c", script], leads=leads)


def never(line: str) -> bool:
    return False


def run(
    *parts: Part, when: Callable[[str], bool] = never, tell: Callable[[str], bool] = never
) -> tuple[int, list[str]]:
    """The crew's status and what it said; SIGTERM is sent to this process at lines that ``when`` names, and whoever
    waits ``UNTIL_TOLD`` goes on at lines that ``tell`` names."""
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if tell(line):
            told.touch()
        if when(line):
            os.kill(os.getpid(), signal.SIGTERM)

    async def main() -> int:
        async with asyncio.timeout(60.0):
            return await Crew(parts, say, {**os.environ, "TOLD": str(told)}).run()

    with tempfile.TemporaryDirectory() as directory:
        told = Path(directory) / "told"
        return asyncio.run(main()), lines


def gone(line: str) -> bool:
    return line == "the coordinator is gone: the run goes on where there is a standby"


def test_the_status_is_the_coordinators_and_the_others_are_dismissed() -> None:
    status, lines = run(sh("c", "sleep 0.2; echo over; exit 7", leads=True), sh("env", UNTIL_EOF))
    assert status == 7
    assert lines == ["over"]


def test_a_role_that_fails_once_it_was_ready_is_the_coordinators_business() -> None:
    lead, failed = sh("c", f"{UNTIL_TOLD}; exit 0", leads=True), "env: exit status 5"
    status, lines = run(lead, sh("env", f"{READY}; exit 5"), tell=lambda line: line == failed)
    assert status == 0
    assert failed in lines


def test_a_run_whose_role_was_never_ready_is_ended_with_that_roles_status() -> None:
    status, lines = run(sh("c", f"{UNTIL_EOF}; exit 130", leads=True), sh("env", "exit 2"))
    assert status == 2
    assert "env was never ready: the run cannot begin" in lines


def test_a_signal_goes_to_the_coordinator_who_dismisses_the_others() -> None:
    lead = sh("c", f"echo up; {UNTIL_EOF}; echo saving; exit 130", leads=True)
    role = sh("env", f"{READY}; {UNTIL_TOLD}; sleep 0.3; echo dismissed")
    status, lines = run(lead, role, when=lambda line: line == "up", tell=lambda line: line == "saving")
    assert status == 130
    assert lines.index("SIGTERM: the coordinator ends the run (again to insist)") < lines.index("saving")
    assert lines[-1] == "env | dismissed"  # nobody ended it under the coordinator


def test_without_the_coordinator_a_first_signal_waits_and_a_second_one_ends() -> None:
    role = sh("env", f"{READY}; {UNTIL_EOF}; exit 3")
    status, lines = run(role, when=lambda line: "is ready" in line or "kept until the coordinator ends" in line)
    assert status in (3, 143)  # its standard input ended and it was asked to end, whichever it saw first
    assert "SIGTERM again: ending everything" in lines


def test_a_killed_coordinator_counts_as_a_shell_counts_it() -> None:
    assert run(sh("c", "kill -9 $$", leads=True))[0] == 128 + signal.SIGKILL


def test_with_a_spare_the_loss_of_the_coordinators_process_is_not_the_end() -> None:
    spare = Part("spare", ["sh", "-c", f"{READY}; {UNTIL_TOLD}; echo dismissed"], spare=True)
    role = sh("env", f"{READY}; {UNTIL_TOLD}; echo dismissed too")
    status, lines = run(sh("c", "sleep 0.2; kill -9 $$", leads=True), role, spare, tell=gone)
    assert status == 0
    assert {"env | dismissed too", "spare | dismissed"} <= set(lines)


def test_once_another_coordinator_leads_a_signal_goes_to_the_spares() -> None:
    spare = Part("spare", ["sh", "-c", f"{READY}; {UNTIL_EOF}; echo saving"], spare=True)
    role = sh("env", f"{READY}; {UNTIL_TOLD}; echo dismissed")
    lead = sh("c", "sleep 0.2; exit 255", leads=True)  # as ssh says it
    status, lines = run(lead, role, spare, when=gone, tell=lambda line: line == "spare | saving")
    assert status == 0
    assert lines[-2:] == ["spare | saving", "env | dismissed"]


@pytest.mark.parametrize("succeeded", [75, 76])  # deposed, or told to step down
def test_where_another_coordinator_leads_the_roles_go_on_until_that_one_dismisses_them(succeeded: int) -> None:
    role = sh("env", f"{READY}; {UNTIL_TOLD}; echo dismissed")
    status, lines = run(sh("c", f"sleep 0.2; exit {succeeded}", leads=True), role, tell=gone)
    assert status == 0
    assert lines[-1] == "env | dismissed"


def test_a_signal_waits_for_the_coordinator_that_leads_elsewhere() -> None:
    role = sh("env", f"{READY}; {UNTIL_TOLD}; echo dismissed")
    kept = "SIGTERM: kept until the coordinator ends the run, 330 s at most (again to insist)"
    lead = sh("c", "sleep 0.2; exit 76", leads=True)
    status, lines = run(lead, role, when=gone, tell=lambda line: line == kept)
    assert status == 0
    assert lines[-1] == "env | dismissed"


def test_a_coordinator_alone_says_that_it_stepped_down() -> None:
    assert run(sh("c", "exit 76", leads=True))[0] == 76


def test_with_a_spare_a_run_that_ends_ends_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "DISMISSED_S", 0.2)  # nobody dismisses it but the crew
    spare = Part("spare", ["sh", "-c", f"{READY}; {UNTIL_EOF}"], spare=True)
    assert run(sh("c", "sleep 0.2; exit 1", leads=True), spare)[0] == 1


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    status, lines = run(Part("c", [str(tmp_path / "start-nothing")], leads=True))
    assert status == 1
    assert lines == [f"c: {tmp_path}/start-nothing cannot be started: No such file or directory"]


def test_what_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "DISMISSED_S", 0.2)
    monkeypatch.setattr(crew, "CLOSED_S", 0.2)
    status, lines = run(sh("c", "sleep 0.5; exit 0", leads=True), sh("env", f"{READY}; exec sleep 600"))
    assert status == 0
    assert lines[-2:] == ["env: did not end in time, killed", "env: exit status 137"]
