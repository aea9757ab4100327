"""TCP windows of a network namespace, whose settings are its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from hwprobe.doctor import windows
from hwprobe.doctor.findings import Fix
from hwprobe.doctor.fixing import apply, fixes_of, read_setting, shown
from tests.support.machines import Machine
from tests.support.namespaces import within

READ, WRITE = "net/ipv4/tcp_rmem", "net/ipv4/tcp_wmem"


def put(setting: str, value: str) -> None:
    Path("/proc/sys", setting).write_text(value)


def small() -> None:
    put(READ, "4096 131072 6291456")
    put(WRITE, "4096 16384 4194304")


def test_short_windows_are_found_and_raised_where_asked(pair: tuple[Machine, Machine]) -> None:
    within(pair[0].name, small)
    found = within(pair[0].name, lambda: windows.look(matters=True)).findings
    ours = [finding for finding in found if finding.subject in ("tcp_rmem", "tcp_wmem")]
    assert [(one.subject, one.severity) for one in ours] == [("tcp_rmem", "warning"), ("tcp_wmem", "warning")]
    assert "found 6.3 MB" in ours[0].evidence
    assert "sysctl -w net.ipv4.tcp_rmem='4096 131072 16777216'" in ours[0].remedy
    fixes = fixes_of(ours)
    assert [shown(fix).done for fix in fixes] == [False, False]
    assert within(pair[0].name, lambda: read_setting(READ)) == "4096 131072 6291456"  # showing changes nothing
    assert [within(pair[0].name, partial(apply, fix)).done for fix in fixes] == [True, True]
    assert within(pair[0].name, lambda: read_setting(READ)) == "4096 131072 16777216"
    again = within(pair[0].name, lambda: windows.look(matters=True)).findings
    assert not [one for one in again if one.subject in ("tcp_rmem", "tcp_wmem")]


def test_short_windows_are_a_note_on_a_host_that_sends_nowhere_fast(pair: tuple[Machine, Machine]) -> None:
    within(pair[0].name, small)
    examined = within(pair[0].name, lambda: windows.look(matters=False))
    assert examined.findings == []
    assert "tcp_rmem 6.3 MB" in examined.notes[0]


def test_windows_without_scaling_are_an_error_everywhere(pair: tuple[Machine, Machine]) -> None:
    within(pair[0].name, lambda: put("net/ipv4/tcp_window_scaling", "0"))
    (finding,) = within(pair[0].name, lambda: windows.look(matters=False)).findings
    assert (finding.severity, finding.fix) == ("error", Fix("net/ipv4/tcp_window_scaling", "0", "1"))
    assert within(pair[0].name, lambda: apply(fixes_of([finding])[0])).done
    assert within(pair[0].name, lambda: windows.look(matters=False)).findings == []


def test_a_setting_that_has_changed_meanwhile_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tcp_rmem").write_text("4096 131072 8388608\n")
    fixed = apply(Fix("tcp_rmem", "4096 131072 6291456", "4096 131072 16777216"), tmp_path)
    assert not fixed.done
    assert fixed.why_not == "it says 4096 131072 8388608 by now, not 4096 131072 6291456"
    assert (tmp_path / "tcp_rmem").read_text() == "4096 131072 8388608\n"
