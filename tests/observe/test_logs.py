"""One line an event, valid JSON, and warnings that people can read."""

from __future__ import annotations

import io
import json
import logging
import math
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from actors.core.logs import close_logging, configure_logging
from tests.support.disks import files_up_to


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    close_logging()
    logging.getLogger().setLevel(level)


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_names_who_and_what_it_is_about(tmp_path: Path) -> None:
    path = configure_logging("engine-0", tmp_path / "logs", job="lake")
    logging.getLogger("rollart").info("swapped in %.1f s", 0.25, extra={"actor": "proxy", "version": 7, "other": 1})
    assert path == tmp_path / "logs" / "engine-0.log"
    (event,) = events(path)
    assert datetime.fromisoformat(event.pop("time")).tzinfo is not None
    assert event == {
        "level": "info", "job": "lake", "node": "engine-0", "logger": "rollart",
        "actor": "proxy", "version": 7, "message": "swapped in 0.2 s",
    }  # fmt: skip


def test_hostile_messages_stay_on_one_line_of_valid_json(tmp_path: Path) -> None:
    path = configure_logging("env", tmp_path)
    logging.getLogger("a").info('two\nlines "quoted" \ud800 \x00 é', extra={"trajectory": math.nan, "version": {1}})
    (event,) = events(path)
    assert event["message"] == 'two\nlines "quoted" \ud800 \x00 é'
    assert (event["trajectory"], event["version"]) == (None, "{1}")


def test_people_are_told_the_same_warning_once_in_ten_seconds_and_how_often_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr, clock = io.StringIO(), [1000.0]
    monkeypatch.setattr("time.time", lambda: clock[0])
    path = configure_logging("env", tmp_path, stderr=stderr)
    log = logging.getLogger("a")
    for moment in (1000.0, 1004.0, 1009.0, 1010.5):
        clock[0] = moment
        log.warning("the disk is full")
    log.warning("the disk is %s", "slow")
    log.error("it ends")
    log.error("it ends")
    assert stderr.getvalue().splitlines() == [
        "warning: env: the disk is full",
        "warning: env: the disk is full (and 2 times more since this was last said)",
        "warning: env: the disk is slow",
        "error: env: it ends",
        "error: env: it ends",
    ]
    assert len(events(path)) == 7


def test_only_warnings_and_worse_reach_people(tmp_path: Path) -> None:
    stderr = io.StringIO()
    path = configure_logging("env", tmp_path, stderr=stderr)
    log = logging.getLogger("a")
    log.info("quiet")
    log.warning("env %d is slow", 3, extra={"trajectory": "t-7", "version": 2})
    assert stderr.getvalue() == "warning: env: env 3 is slow (trajectory t-7, version 2)\n"
    assert [event["message"] for event in events(path)] == ["quiet", "env 3 is slow"]


def test_an_exception_is_kept_with_its_traceback(tmp_path: Path) -> None:
    path = configure_logging("env", tmp_path, stderr=io.StringIO())
    try:
        raise KeyError("lost")
    except KeyError:
        logging.getLogger("a").exception("reset failed")
    (event,) = events(path)
    assert event["message"] == "reset failed"
    assert event["error"].startswith("Traceback")
    assert event["error"].endswith("KeyError: 'lost'")


def test_configuring_again_moves_to_the_new_file_without_doubling_events(tmp_path: Path) -> None:
    first = configure_logging("a", tmp_path)
    logging.getLogger("x").info("one")
    second = configure_logging("b", tmp_path)
    logging.getLogger("x").info("two")
    assert [event["message"] for event in events(first)] == ["one"]
    assert [event["message"] for event in events(second)] == ["two"]


def test_python_warnings_go_to_the_file_alone(tmp_path: Path) -> None:
    stderr = io.StringIO()
    path = configure_logging("env", tmp_path, stderr=stderr)
    with warnings.catch_warnings():
        logging.captureWarnings(True)  # pytest's own capture of warnings stands aside
        warnings.simplefilter("always")
        warnings.warn("old style", DeprecationWarning, stacklevel=1)
    assert stderr.getvalue() == ""
    assert "old style" in events(path)[0]["message"]


def test_a_process_that_dies_of_an_exception_leaves_it_in_its_log(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys\n"
        "from actors.core.logs import configure_logging\n"
        "configure_logging('engine-1', pathlib.Path(sys.argv[1]), job='lake')\n"
        "raise RuntimeError('out of memory')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("critical: engine-1: the process ends: out of memory\nTraceback")
    (event,) = events(tmp_path / "engine-1.log")
    assert event["level"] == "critical"
    assert event["error"].endswith("RuntimeError: out of memory")


def test_a_log_on_a_full_disk_is_told_once_and_costs_nobody_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = configure_logging("env", tmp_path, stderr=io.StringIO())
    log = logging.getLogger("a")
    with files_up_to(0):
        for number in range(3):
            log.info("event %d", number)
    assert capsys.readouterr().err.splitlines() == [
        f"warning: {path} cannot be written, and will have gaps: [Errno 27] File too large"
    ]
