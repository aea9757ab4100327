"""``bin/trace`` as a user meets it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from hwprobe.host_usage import between, read_host_usage
from hwprobe.live import HEADER, Line, head
from hwprobe.telemetry import GpuFigures
from hwprobe.tracing.__main__ import main
from hwprobe.tracing.kernel import Offer, look
from hwprobe.tracing.report import Report
from tests.tracing.loads import SLEEPS, running, works

ROOT = Path(__file__).resolve().parents[2]


class Offers(msgspec.Struct):
    offers: list[Offer]


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hwprobe.tracing", *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(("how", "number"), [("sampling", signal.SIGTERM), ("bpf", signal.SIGINT)])
def test_an_interruption_ends_the_children_and_tells_what_was_gathered(how: str, number: signal.Signals) -> None:
    works(look(), "offcpu", "bpf" if how == "bpf" else "sampling")
    with running(SLEEPS) as sleeper:
        tracer = start("offcpu", "--pid", str(sleeper.pid), "--by", how, "--seconds", "600", "--json")
        assert tracer.stderr is not None
        assert "watching 1 processes for 600 s" in tracer.stderr.readline()
        children = children_of(tracer.pid)
        assert len(children) == (how == "bpf")
        tracer.send_signal(number)
        output, complaints = tracer.communicate(timeout=240)
    assert tracer.returncode == 0, complaints
    report = msgspec.json.decode(output, type=Report)
    assert report.interrupted
    assert report.seconds < 600
    assert report.entries
    assert not [pid for pid in children if os.path.exists(f"/proc/{pid}")]


def test_a_trace_ends_with_the_last_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with running("time.sleep(600)") as process:
        threading.Timer(1.0, process.kill).start()
        words = ["offcpu", "--by", "sampling", "--seconds", "600", "--pid", str(process.pid), "--json"]
        assert main([*words, "--svg", str(tmp_path / "out.svg"), "--folded", str(tmp_path / "out.folded")]) == 0
    report = msgspec.json.decode(capfd.readouterr().out, type=Report)
    assert "all traced processes have ended" in report.notes
    assert not report.interrupted
    assert (tmp_path / "out.svg").read_text().startswith("<svg")
    assert (tmp_path / "out.folded").read_text().count("\n") == len(report.folded)


def test_every_way_of_every_tool_is_told_with_what_it_gives_or_why_it_does_not(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "--json"]) == 0
    found = msgspec.json.decode(capfd.readouterr().out, type=Offers).offers
    assert len({(offer.tool, offer.how) for offer in found}) == 13  # six tools by BPF and looks, stacks by py-spy too
    assert all(offer.detail for offer in found)
    assert main(["check"]) == 0
    assert all(offer.detail in capfd.readouterr().out for offer in found[:1])


def test_a_process_that_does_not_exist_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    gone = int(Path("/proc/sys/kernel/pid_max").read_text()) - 1
    assert main(["offcpu", "--pid", str(gone)]) == 2
    assert capfd.readouterr().err == f"trace: no such process: {gone}\n"
    assert main(["offcpu"]) == 2
    assert "name some by --pid, or a run by --run" in capfd.readouterr().err


def test_a_way_that_does_not_exist_here_is_not_replaced_by_another(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(tmp_path))
    with running(SLEEPS) as sleeper:
        assert main(["offcpu", "--pid", str(sleeper.pid), "--by", "bpf"]) == 1
    error = capfd.readouterr().err
    assert "bpftrace is not installed" in error
    assert error.count("\n") == 1


def test_without_bpf_the_next_way_is_taken_and_says_why(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with running(SLEEPS) as sleeper:
        assert main(["offcpu", "--pid", str(sleeper.pid), "--seconds", "0.5"]) == 0
    output = capfd.readouterr().out
    assert "by sampling" in output
    assert "note: not by bpf: bpftrace is not installed" in output


def test_a_live_line_has_the_hosts_figures(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["live", "--lines", "1", "--every", "0.1", "--json"]) == 0
    line = msgspec.json.decode(capfd.readouterr().out)
    assert 0 <= line["host"]["cpu_busy"] <= 1
    assert 0 < line["host"]["memory_used"] < line["host"]["memory_total"]


def test_above_live_lines_it_is_said_what_cannot_be_known() -> None:
    reading = read_host_usage()
    gpus = GpuFigures(
        state="measuring", samples=1, utilisation=None, memory_used=1, memory_total=2, devices=(), errors={}
    )
    line = Line(0.0, between(reading, reading), gpus)
    assert head(line) == HEADER
    gpus = msgspec.structs.replace(gpus, missing="no utilisation of a slice")
    assert head(msgspec.structs.replace(line, gpus=gpus)) == f"(no utilisation of a slice)\n{HEADER}"
