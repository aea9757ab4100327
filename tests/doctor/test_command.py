"""``bin/doctor`` as it is called: on a healthy machine, on two healthy hosts, and what it says of ill ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bus.security import make_key
from coordinator.commands.doctor import main
from hwprobe.doctor import Checked, Finding
from hwprobe.doctor.fixing import Fixed
from tests.doctor.conftest import set_mtu
from tests.doctor.test_between import serving
from tests.doctor.test_training import UP_AND_DOWN, run
from tests.support.machines import Machine
from tests.support.namespaces import within

ROOT = Path(__file__).resolve().parents[2]


class Document(msgspec.Struct):
    host: str
    healthy: bool
    findings: list[Finding]
    checks: list[Checked]
    fixes: list[Fixed]


def called(words: list[str], before: list[str]) -> tuple[int, Document]:
    command = [*before, sys.executable, "-m", "coordinator.commands.doctor", "--json", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=300)
    assert done.returncode in (0, 1), done.stderr.decode()
    return done.returncode, msgspec.json.decode(done.stdout, type=Document)


def test_this_machine_is_healthy(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status = main(["--json", "--runs", str(tmp_path)])
    document = msgspec.json.decode(capfd.readouterr().out, type=Document)
    assert document.findings == []
    assert (status, document.healthy, document.fixes) == (0, True, [])
    looked = [checked.name for checked in document.checks if checked.outcome == "healthy"]
    assert {"interfaces", "windows", "memory", "files", "ports", "packages", "disks"} <= set(looked)


def test_two_healthy_hosts_give_no_finding_and_a_fault_of_one_is_found(
    pair: tuple[Machine, Machine], tmp_path: Path
) -> None:
    one, other = pair
    key = make_key(tmp_path / "cluster.key")
    raise_windows = "echo '4096 131072 16777216' | tee /proc/sys/net/ipv4/tcp_rmem /proc/sys/net/ipv4/tcp_wmem"
    subprocess.run(one.words(["sh", "-c", raise_windows]), check=True, capture_output=True)
    with serving(["--host", other.address, "--key-file", str(key.path)], other.words([])) as peer:
        words = ["--peer", f"tcp://{peer.name}", "--key-file", str(key.path), "--runs", str(tmp_path)]
        status, document = called(words, one.words([]))
        assert document.findings == []
        assert status == 0
        asked = {checked.name: checked.outcome for checked in document.checks}
        for name in ("mtu", "loss", "reach", "latency", "bandwidth", "clock", "software", "windows"):
            assert asked[name] == "healthy"
        for machine in pair:
            set_mtu(machine, 1500)
        status, document = called([*words, "--only", "mtu,interfaces"], one.words([]))
    assert status == 1
    assert [(finding.check, finding.severity) for finding in document.findings] == [("mtu", "warning")]
    assert "expected an MTU of 9000 at 10 Gbit/s, found 1500 (eth0)" in document.findings[0].evidence


def test_fixing_is_shown_unless_it_is_wanted(pair: tuple[Machine, Machine], capfd: pytest.CaptureFixture[str]) -> None:
    one, other = pair
    setting = Path("/proc/sys/net/ipv4/tcp_rmem")

    def fixed(*words: str) -> tuple[int, Document, Fixed]:
        arguments = ["--json", "--peer", other.address, "--only", "windows", "--fix", *words]
        status = within(one.name, lambda: main(arguments))
        document = msgspec.json.decode(capfd.readouterr().out, type=Document)
        (ours,) = [fix for fix in document.fixes if fix.setting == "net/ipv4/tcp_rmem"]
        return status, document, ours

    within(one.name, lambda: setting.write_text("4096 131072 6291456"))
    status, document, shown = fixed()
    assert (status, shown.done, shown.why_not) == (1, False, "")
    assert within(one.name, setting.read_text).split() == ["4096", "131072", "6291456"]
    status, document, done = fixed("--yes")
    assert (done.done, done.after) == (True, "4096 131072 16777216")
    assert "tcp_rmem" not in {finding.subject for finding in document.findings}
    assert within(one.name, setting.read_text).split() == ["4096", "131072", "16777216"]


def test_an_ill_run_is_told_with_cause_and_remedy(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = run(tmp_path, UP_AND_DOWN, overrides=["scheduling.alpha=4"], staleness_max=4)
    assert main([str(path), "--only", "training,disks"]) == 1
    text = capfd.readouterr().out
    assert "1 warning in 2 checks" in text
    assert "warning: training: evaluations" in text
    assert "scheduling.alpha=1, or 0" in text
    assert "\x1b" not in text


def test_the_checks_are_listed_in_their_order(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    names = [line.split()[0] for line in capfd.readouterr().out.splitlines()]
    assert names.index("interfaces") < names.index("mtu") < names.index("bandwidth") < names.index("training")
    assert main(["--list", "--only", "gpus,mtu"]) == 0
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()] == ["mtu", "gpus"]


def test_wrong_usage_is_one_line_and_status_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--only", "teeth"],
        ["--peer", "tcp://10.0.0.1"],
        ["--yes"],
        ["--store", "redis://here"],
        [str(tmp_path / "no-run")],
        ["--hosts", str(tmp_path / "no-hosts.yaml")],
        ["--serve", "--host", "10.0.0.1"],
        ["--serve", "--port", "99999"],
        ["--port", "-1"],
        ["--mooncake-log", str(tmp_path / "no.log")],
    ):
        assert main(words) == 2, words
        said = capfd.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1), words
        assert said.err.startswith("error: ")


def test_the_help_says_how_it_is_used(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capfd.readouterr().out
    assert "exit status: 0 nothing to be done, 1 something is, 2 wrong usage" in text
