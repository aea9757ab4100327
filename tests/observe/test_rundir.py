"""One owner, unique names, and a resumed run that continues its history."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec
import pytest

from coordinator.hostbook import HostBook
from coordinator.observe.lines import LineWriter, read_lines
from coordinator.observe.records import decode_metric, decode_sample
from coordinator.observe.rundir import RunDirectory, RunDirectoryError, RunDirectoryInUse
from tests.observe.samples import evaluation, sample, step

NOON = datetime(2026, 1, 31, 12, 0, 5)


class Settings(msgspec.Struct):
    name: str = "lake"
    alpha: int = 1


def finished_run(base: Path) -> Path:
    with RunDirectory.create(base, "lake", NOON) as run:
        run.write_job(Settings())
        return run.path


def test_runs_of_the_same_second_get_different_directories_and_latest_is_the_newest(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "runs", "lake", NOON) as first:
        assert (tmp_path / "runs" / "latest").resolve() == first.path
        with RunDirectory.create(tmp_path / "runs", "lake", NOON) as second:
            assert (first.path.name, second.path.name) == ("20260131-120005-lake", "20260131-120005-lake-2")
            assert (tmp_path / "runs" / "latest").resolve() == second.path
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "20260131-120005-lake", "20260131-120005-lake-2", "latest",
    ]  # fmt: skip


def test_latest_still_points_at_the_run_when_the_whole_base_is_moved(tmp_path: Path) -> None:
    name = finished_run(tmp_path / "runs").name
    (tmp_path / "runs").rename(tmp_path / "archive")
    assert RunDirectory.open(tmp_path / "archive" / "latest").path.name == name


def test_a_job_name_cannot_leave_the_base(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "runs", "../../etc/x y", NOON) as run:
        assert run.path.parent == tmp_path / "runs"
        assert run.path.name == "20260131-120005-etc-x-y"


def test_a_base_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RunDirectoryError, match=r"runs: a run directory cannot be made there"):
        RunDirectory.create(tmp_path / "runs", "lake")


def test_a_second_owner_is_refused_and_told_the_pid_of_the_first(tmp_path: Path) -> None:
    path = finished_run(tmp_path)
    program = (
        "import sys, pathlib\n"
        "from coordinator.observe.rundir import RunDirectory\n"
        "run = RunDirectory.open(pathlib.Path(sys.argv[1]), own=True)\n"
        "print('owned', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "owned\n"
            with pytest.raises(RunDirectoryInUse, match=rf"in use by process {other.pid} on .* since \d{{4}}-"):
                RunDirectory.open(path, own=True)
            RunDirectory.open(path)  # a reader is welcome
        finally:
            other.kill()  # ownership ends with the process, with nothing to clean up
    RunDirectory.open(path, own=True).release()


def test_the_same_process_cannot_own_a_directory_twice(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "lake") as run:
        run.write_job(Settings())
        with pytest.raises(RunDirectoryInUse):
            RunDirectory.open(run.path, own=True)
    with RunDirectory.open(run.path, own=True):
        pass


def test_what_is_not_a_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no such run directory"):
        RunDirectory.open(tmp_path / "nothing")
    with pytest.raises(RunDirectoryError, match=r"no job\.yaml"):
        RunDirectory.open(tmp_path)


def older_run(path: Path) -> Path:
    """As run directories were before they said their format: job and metrics, no ``format.json``."""
    path.mkdir()
    (path / "job.yaml").write_text("name: lake\nalpha: 1\n")
    (path / "metrics.jsonl").write_text(
        '{"record":"evaluation","version":2,"episodes":8,"success":0.5,"return_mean":0.5,"turns_mean":6.0}\n'
    )
    return path


def test_a_run_from_before_directories_said_their_format_is_read_and_resumed(tmp_path: Path) -> None:
    path = older_run(tmp_path / "old")
    assert RunDirectory.open(path).read_job() == {"name": "lake", "alpha": 1}
    assert not (path / "format.json").exists()  # who only reads changes nothing
    with RunDirectory.open(path, own=True) as run:
        (record,) = read_lines(run.metrics, decode_metric).records
    assert (type(record).__name__, record.version) == ("EvalRecord", 2)
    assert json.loads((path / "format.json").read_text())["format"] == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"format": 2, "more": []}', "a run directory of format 2, of newer software; this software ("),
        ("{}", "it does not say the format of the run: Object missing required field `format`"),
        ("?", "it does not say the format of the run: JSON is malformed"),
    ],
)
def test_a_run_of_newer_software_is_refused_by_one_line_and_not_touched(
    tmp_path: Path, content: str, said: str
) -> None:
    path = finished_run(tmp_path)
    (path / "format.json").write_text(content)
    before = sorted(path.iterdir())
    for open_ in (RunDirectory.open, partial(RunDirectory.open, own=True), RunDirectory.take_over):
        with pytest.raises(RunDirectoryError) as caught:
            open_(path)
        assert str(caught.value).startswith(f"{path / 'format.json'}: {said}")
        assert "\n" not in str(caught.value)
    assert (sorted(path.iterdir()), (path / "format.json").read_text()) == (before, content)


def test_what_an_old_leader_writes_of_hosts_is_in_no_file_of_the_next_one(tmp_path: Path) -> None:
    path = finished_run(tmp_path)
    old = HostBook(path / "hosts.jsonl", lambda: 1000.0)
    old.up("10.0.0.2", "proxy-1", "proxy")
    before = (path / "hosts.jsonl").read_bytes()
    with RunDirectory.take_over(path) as taken:
        old.fell("lost", "10.0.0.2", "proxy-1", ["proxy"], "no sign of life for 20.0 s")
        assert taken.hosts.read_bytes() == before
    old.close()


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    run = RunDirectory.open(finished_run(tmp_path))
    with pytest.raises(RunDirectoryError, match="opened for reading"):
        run.rewind(0)
    with pytest.raises(RunDirectoryError, match="opened for reading"):
        run.add_sample(sample("t"))


def test_the_resolved_job_comes_back_in_its_order(tmp_path: Path) -> None:
    run = RunDirectory.open(finished_run(tmp_path))
    assert run.job_file.read_text() == "name: lake\nalpha: 1\n"
    assert run.read_job() == {"name": "lake", "alpha": 1}


def test_resuming_from_version_2_sets_later_metrics_aside(tmp_path: Path) -> None:
    path = finished_run(tmp_path)
    records = [step(1), step(2), evaluation(2), step(3), evaluation(3)]
    writer = LineWriter(path / "metrics.jsonl")
    writer.write_all(records)
    writer.close()
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"record":"step","st')  # the crash tore this line
    with RunDirectory.open(path, own=True) as run:
        assert run.rewind(2) == 2
        assert run.rewind(2) == 0
        assert read_lines(run.metrics, decode_metric).records == records[:3]
        aside = read_lines(run.path / "metrics.aside.jsonl", decode_metric)
        assert (aside.records, aside.unreadable) == (records[3:], 0)


def test_samples_are_text_files_with_an_index_that_is_rewound_too(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "lake") as run:
        first = run.add_sample(sample("g1/0", version=2))
        run.add_sample(sample("g9/0", version=9))
        assert first == run.samples / "v00002-g1-0.txt"
        assert "--- action ---\nright\n" in first.read_text()
        run.rewind(2)
        assert read_lines(run.sample_index, decode_sample).records == [sample("g1/0", version=2)]


def test_recorded_batches_beyond_the_version_are_set_aside(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "lake") as run:
        run.recorded.mkdir()
        for version in (1, 2, 3, 12):
            (run.recorded / f"v{version:05d}.log").write_bytes(b"batch")
        run.rewind(2)
        names = sorted(path.name for path in run.recorded.iterdir())
        assert names == ["v00001.log", "v00002.log", "v00003.aside", "v00012.aside"]


def test_places_are_short_when_the_run_lies_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with RunDirectory.create(Path("runs"), "lake", NOON) as run:
        places = run.places()
    assert places["report"] == "runs/20260131-120005-lake/report.html"
    assert places["evaluate"] == "bin/eval runs/20260131-120005-lake"
