"""The report of a run that goes on is written beside it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from coordinator.job import Job
from coordinator.observe.reporting import MODULE, ReportFailed, ReportWriter
from coordinator.observe.rundir import RunDirectory

TIMEOUT_S = 60.0


def children() -> list[int]:
    """Those that write reports: other tests' servers may be about."""
    found = []
    for child in psutil.Process(os.getpid()).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if MODULE in child.cmdline():
                found.append(child.pid)
    return found


def wait_for_the_process(writer: ReportWriter) -> None:
    process = writer._process
    assert process is not None
    process.wait(TIMEOUT_S)


def test_a_report_is_written_by_another_process_and_once_more_at_the_end(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "job") as run:
        run.write_job(Job(name="lake"))
        writer = ReportWriter(run)
        writer.refresh()
        assert len(children()) == 1
        writer.refresh()  # it is still at work
        assert len(children()) == 1
        wait_for_the_process(writer)
        assert "running" in run.report.read_text()
        writer.refresh()
        writer.finish("finished")
        assert children() == []
        assert "finished" in run.report.read_text()


def test_a_report_that_could_not_be_written_is_told_the_next_time(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "job") as run:
        run.write_job(Job(name="lake"))
        run.report.mkdir()  # no file can take its place
        writer = ReportWriter(run)
        writer.refresh()
        wait_for_the_process(writer)
        with pytest.raises(ReportFailed, match="exit status 1"):
            writer.refresh()
        wait_for_the_process(writer)
        assert "report.html" in (run.logs / "report.out").read_text()


KILLED = """
import sys
import time
from pathlib import Path
from coordinator.observe import reporting
from coordinator.observe.rundir import RunDirectory
reporting.MODULE = "slow_to_import"
with RunDirectory.create(Path(sys.argv[1]), "job") as run:
    writer = reporting.ReportWriter(run)
    writer.refresh()
    print(writer._process.pid, flush=True)
    sys.stdin.read()
"""


def test_a_writer_that_is_still_loading_dies_with_its_parent(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    slow = f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(600)\n"
    (tmp_path / "slow_to_import.py").write_text(slow)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    words = [sys.executable, "-c", KILLED, str(tmp_path / "runs")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        writer = psutil.Process(int(parent.stdout.readline()))
        while not begun.exists():
            assert parent.poll() is None
            time.sleep(0.01)
        parent.send_signal(signal.SIGKILL)
    with contextlib.suppress(psutil.NoSuchProcess):
        writer.wait(TIMEOUT_S)
