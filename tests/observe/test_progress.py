"""What a log file gets, word for word, and what a terminal gets."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.observe.panel import LiveProgress
from coordinator.observe.progress import INTERRUPTED, PlainProgress, can_be_live, open_progress
from tests.observe.samples import evaluation, step


def ticking(*times: float) -> Iterator[float]:
    return iter(times)


def plain(*times: float) -> tuple[PlainProgress, io.StringIO]:
    stream = io.StringIO()
    clock = ticking(*times)
    return PlainProgress(60, stream, lambda: next(clock)), stream


def test_a_whole_run_as_plain_lines() -> None:
    progress, stream = plain(0.0, 4.1)
    with progress.phase("starting engine-0 (torch)"):
        pass
    progress.step(step(1, elapsed_s=5.0, reward_trend=0.30))
    progress.step(step(2, elapsed_s=6.0, reward_trend=0.35))
    progress.evaluation(evaluation(2))
    progress.warn("engine-0 is slow")
    progress.note("checkpoint written")
    progress.interrupted()
    progress.finish("stopped: 2 steps in 0:06", {"run directory": "runs/x", "report": "runs/x/report.html"})
    progress.finish("again", {})
    assert stream.getvalue() == (
        "starting engine-0 (torch) ... 4.1 s\n"
        "step 1/60  v1  reward 0.42 =  success 42%  1840 tok/s  stale 0.9  in flight 64"
        "  lost 3 (stale 2, env_failed 1)\n"
        "step 2/60  v2  reward 0.42 ^  success 42%  1840 tok/s  stale 0.9  in flight 64"
        "  lost 3 (stale 2, env_failed 1)  eta 0:58\n"
        "evaluation v2  success 62% of 8  return 0.62  turns 7.1\n"
        "warning: engine-0 is slow\n"
        "checkpoint written\n"
        "Ctrl-C: stopping; a checkpoint is written first (Ctrl-C again stops at once, without one)\n"
        "stopped: 2 steps in 0:06\n"
        "  run directory  runs/x\n"
        "  report         runs/x/report.html\n"
    )


def test_phases_at_the_same_time_each_end_on_a_line_of_their_own() -> None:
    progress, stream = plain(0.0, 1.0, 3.5, 6.0)
    with progress.phase("starting engine-0"):
        assert stream.getvalue() == "starting engine-0 ..."  # seen before it is done
        with progress.phase("starting trainer"):
            pass
    assert stream.getvalue() == (
        "starting engine-0 ...\nstarting trainer ... 2.5 s\nstarting engine-0 ... 6.0 s\n"
    )  # fmt: skip


def test_a_phase_that_fails_says_so_and_lets_the_error_through() -> None:
    progress, stream = plain(0.0, 2.0)
    with pytest.raises(TimeoutError), progress.phase("starting engine-0"):
        raise TimeoutError("no answer")
    assert stream.getvalue() == "starting engine-0 ... failed after 2.0 s (TimeoutError)\n"


def test_a_stream_that_knows_only_ascii_still_gets_every_line() -> None:
    raw = io.BytesIO()
    progress = PlainProgress(60, io.TextIOWrapper(raw, encoding="ascii"))
    progress.warn("schön ✓")
    assert raw.getvalue() == b"warning: sch\\xf6n \\u2713\n"


def test_what_is_not_a_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(open_progress("lake", 60, io.StringIO()), PlainProgress)


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    _, terminal = pty.openpty()
    with os.fdopen(terminal, "w", encoding="utf-8") as stream:
        monkeypatch.setenv("TERM", "dumb")
        assert not can_be_live(stream)
        monkeypatch.setenv("TERM", "xterm")
        assert can_be_live(stream)


DEMO = """
import time
from coordinator.observe.progress import open_progress
from tests.observe.samples import evaluation, step
progress = open_progress("frozen[lake]", 60)
with progress.phase("starting [engine-0]"):
    time.sleep(0.3)
for number in (11, 12):
    progress.step(step(number, reward_trend=number / 100))
progress.evaluation(evaluation(10))
time.sleep(0.5)
print("printed by somebody else")
progress.interrupted()
progress.finish("stopped: 12 steps", {"report": "runs/x/report.html"})
"""


def on_a_terminal(program: str, columns: int) -> str:
    """All that a program writes to a terminal of that width."""
    controller, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "40", "PYTHONUTF8": "1"}
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=terminal, stdout=terminal, stderr=terminal, env=environment, cwd=root
    ) as child:
        os.close(terminal)
        output = b""
        deadline = threading.Timer(60, child.kill)
        deadline.start()
        try:
            while data := os.read(controller, 65536):
                output += data
        except OSError:  # Linux: the last writer has closed the terminal
            pass
        finally:
            deadline.cancel()
            os.close(controller)
        assert child.wait(timeout=30) == 0, output.decode()
    return output.decode().replace("\r\n", "\n")


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_terminal_gets_a_panel_that_is_redrawn_in_place_and_stays_at_the_end() -> None:
    output = without_colours(on_a_terminal(DEMO, 90))
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1  # the cursor is given back
    live, last = output.split("\x1b[?25h")
    assert "\x1b[1A\x1b[2K" in live  # up and clear: drawn over
    assert "now        starting [engine-0] ... 0 s" in live
    assert re.search(r"starting \[engine-0\] \.\.\. \d+\.\d s\n", live)
    assert "printed by somebody else\n" in live
    assert INTERRUPTED in live
    frame = last[last.index("╭") : last.index("╯")]
    assert last.count("╭") == 1
    for words in (
        "frozen[lake]",
        "step       12/60",
        "reward       0.42 ↑ ▁▁",
        "success       42%",
        "evaluation    62%   v10 · best 62% v10",
        "speed        1840   tokens/s wait_batch 0.9 s · train 0.8 s · publish 0.3 s",
        "staleness     0.9   at most 1",
        "in flight      64   buffered 12",
        "lost            3   stale 2, env_failed 1",
    ):
        assert words in frame
    assert "stopped: 12 steps\n  report  runs/x/report.html" in last


@pytest.mark.parametrize("columns", [40, 90, 200])
def test_the_panel_never_is_wider_than_the_terminal(columns: int) -> None:
    last = without_colours(on_a_terminal(DEMO, columns)).split("\x1b[?25h")[1]
    frame = [line for line in last.splitlines() if line.startswith(("╭", "│", "╰"))]
    assert {len(line) for line in frame} == {min(columns, 100)}


def test_a_program_that_dies_gives_the_cursor_back() -> None:
    program = "from coordinator.observe.progress import open_progress\nopen_progress('x', 60)\nraise SystemExit(0)"
    output = on_a_terminal(program, 80)
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")


def test_the_time_left_counts_down_between_steps() -> None:
    now = 0.0
    stream = io.StringIO()
    progress = LiveProgress("lake", 60, stream, lambda: now)
    progress.step(step(1, elapsed_s=10.0))
    progress.step(step(2, elapsed_s=11.0))
    now = 8.0
    with progress.console.capture() as captured:
        progress.console.print(progress.render())
    progress.close()
    assert "0:19 · eta 0:50" in captured.get()  # 58 steps at 1 s, 8 s ago
