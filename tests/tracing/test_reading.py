"""What bpftrace, ss and the kernel print, as recorded, and what is made of it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from hwprobe.tracing.bpftrace import frames, parse, split_key
from hwprobe.tracing.programs import program
from hwprobe.tracing.report import Bucket
from hwprobe.tracing.sockets import Meter, parse_ss, sent_segments
from hwprobe.tracing.syscall_names import call_name
from hwprobe.tracing.targets import NoTarget, Targets, of_run, stat_fields
from hwprobe.tracing.threads import call_of, kernel_stack, read_thread, waits_in
from tests.hwprobe.trees import write

# iproute2 6.1; the second connection with its information on a line of its own.
SS = """\
ESTAB 0      0               127.0.0.1:5000       127.0.0.1:40312 users:(("python3",pid=4711,fd=5)) cubic wscale:7,7 \
rto:204 rtt:0.05/0.02 mss:32768 segs_out:120 segs_in:90 retrans:0/3 rcv_space:65483
SYN-SENT 0   1 [::ffff:10.9.9.1]%dummy0:51000  [::ffff:10.9.9.2]:80 users:(("w",pid=4712,fd=3),("w",pid=4713,fd=3))
\t cubic rto:4000 backoff:2 mss:524 cwnd:1 segs_out:3 lastsnd:1232 retrans:1/2 lost:1
ESTAB 0      0      [fe80::1%eth0]:22 [fe80::2]:50000
\t cubic segs_out:7
"""


def test_connections_have_their_processes_and_counters() -> None:
    first, second, third = parse_ss(SS)
    assert (first.name, first.pids) == ("127.0.0.1:5000 > 127.0.0.1:40312", (4711,))
    assert (first.retransmits, first.segments_out) == (3, 120)
    assert (second.name, second.pids) == ("10.9.9.1:51000 > 10.9.9.2:80", (4712, 4713))
    assert (second.retransmits, second.segments_out) == (2, 3)
    assert (third.name, third.pids, third.retransmits) == ("[fe80::1]:22 > [fe80::2]:50000", (), 0)


def test_a_connections_counters_count_from_the_first_look_or_from_its_beginning() -> None:
    first, second, _ = parse_ss(SS)
    meter = Meter([first])
    later, *_ = parse_ss(SS.replace("retrans:0/3", "retrans:0/10").replace("segs_out:120", "segs_out:200"))
    meter.look([later, second])
    assert [(one.name, one.retransmits, one.segments_out) for one in meter.changes()] == [
        (first.name, 7, 80),
        (second.name, 2, 3),
    ]


def test_the_machines_segments_are_read_by_the_names_in_the_file(tmp_path: Path) -> None:
    text = "Tcp: RtoAlgorithm OutSegs RetransSegs InErrs\nTcp: 1 1000 25 0\nUdp: InDatagrams\nUdp: 5\n"
    write(tmp_path, {"7/net/snmp": text})
    assert sent_segments(7, tmp_path) == (1000, 25)
    assert sent_segments(8, tmp_path) is None


def test_a_threads_files_are_read_whatever_its_name_holds(tmp_path: Path) -> None:
    fields = ["S", "1", *["0"] * 5, "111", "0", "5", "0", "30", "20", *["0"] * 6, "4200", *["0"] * 10]
    write(
        tmp_path,
        {
            "7/task/8/stat": f"8 (a) b (c) {' '.join(fields)}",
            "7/task/8/schedstat": "1500000 2500000 12\n",
            "7/task/8/wchan": "futex_wait_queue",
            "7/task/8/stack": "[<0>] futex_wait_queue+0x60/0x90\n[<0>] do_futex+0x1/0x2\n[<0>] entry_SYSCALL+0x7/0x7\n",
            "7/task/8/syscall": "202 0x1 0x2 0x3 0x4 0x5 0x6 0x7ffc 0x7ffb\n",
        },
    )
    facts = read_thread(7, 8, tmp_path)
    assert facts is not None
    assert (facts.name, facts.state, facts.label) == ("a) b (c", "S", "a) b (c 7/8")
    assert (facts.run_ns, facts.wait_ns, facts.slices) == (1_500_000, 2_500_000, 12)
    assert (facts.minor_faults, facts.major_faults) == (111, 5)
    assert kernel_stack(7, 8, tmp_path) == ("entry_SYSCALL", "do_futex", "futex_wait_queue")
    assert waits_in(7, 8, tmp_path) == "futex_wait_queue"
    assert call_of(7, 8, tmp_path) == (202, "0x1 0x2 0x3 0x4 0x5 0x6")
    write(tmp_path, {"7/task/8/syscall": "running\n", "7/task/8/wchan": "0"})
    assert call_of(7, 8, tmp_path) is None
    assert waits_in(7, 8, tmp_path) is None
    assert read_thread(7, 9, tmp_path) is None
    assert kernel_stack(7, 9, tmp_path) is None


def test_a_corpse_is_no_thread() -> None:
    assert stat_fields(f"8 (gone) Z 1 {'0 ' * 40}") is None


@pytest.mark.parametrize(
    ("number", "machine", "name"),
    # include/uapi/asm-generic/unistd.h and arch/x86/entry/syscalls/syscall_64.tbl of Linux 6.10
    [
        (0, "x86_64", "read"),
        (202, "x86_64", "futex"),
        (281, "x86_64", "epoll_pwait"),
        (334, "x86_64", "rseq"),
        (426, "x86_64", "io_uring_enter"),
        (441, "aarch64", "epoll_pwait2"),
        (462, "x86_64", "mseal"),
        (98, "aarch64", "call 98"),
        (400, "x86_64", "call 400"),
    ],
)
def test_calls_have_their_names_or_stay_numbers(number: int, machine: str, name: str) -> None:
    assert call_name(number, machine) == name


def test_a_run_is_traced_by_the_process_that_holds_its_lock(tmp_path: Path) -> None:
    run, proc = tmp_path / "run", tmp_path / "proc"
    owner = {"pid": 7, "host": socket.gethostname(), "since": "2026-01-31 14:25:01"}
    write(tmp_path, {"run/owner.lock": json.dumps(owner) + "\n", "proc/7/stat": "7 (x) S"})
    with pytest.raises(NoTarget, match=r"no run is going on there \(process 7 does not hold owner.lock any more\)"):
        of_run(run, proc)
    (proc / "7" / "fd").mkdir()
    (proc / "7" / "fd" / "3").symlink_to((run / "owner.lock").resolve())
    assert of_run(run, proc) == 7
    write(tmp_path, {"run/owner.lock": json.dumps(owner | {"host": "elsewhere"})})
    with pytest.raises(NoTarget, match="its control process is on elsewhere"):
        of_run(run, proc)
    with pytest.raises(NoTarget, match="not the directory of a run"):
        of_run(tmp_path / "absent", proc)


def test_children_and_their_children_are_traced_also_after_their_parent_has_gone(tmp_path: Path) -> None:
    def stat(pid: int, parent: int) -> str:
        return f"{pid} (x) S {parent} {'0 ' * 40}"

    write(tmp_path, {f"{pid}/stat": stat(pid, parent) for pid, parent in ((7, 1), (8, 7), (9, 8), (10, 1))})
    targets = Targets([7], proc=tmp_path)
    assert targets.look() == (7, 8, 9)
    assert Targets([7], proc=tmp_path, children=False).look() == (7,)
    (tmp_path / "8" / "stat").unlink()
    (tmp_path / "8").rmdir()
    write(tmp_path, {"9/stat": stat(9, 1), "11/stat": stat(11, 9)})
    assert targets.look() == (7, 9, 11)


def test_programs_follow_the_processes_and_end_by_themselves() -> None:
    text = program("offcpu", [7, 9], 10, children=True, threshold_us=0)
    assert "@watched[7] = 1; @watched[9] = 1;" in text
    assert "sched_process_fork" in text
    assert "interval:s:70 { exit(); }" in text
    assert "sched_process_fork" not in program("faults", [7], 10, children=False, threshold_us=0)
    assert "$us >= 25000" in program("syscalls", [7], 10, children=True, threshold_us=25000)


# bpftrace 0.17.0 on Linux 6.18: -f json, a process that sleeps again and again, the addresses after + as printed.
OFFCPU = r"""{"type": "attached_probes", "data": {"probes": 6}}
{"type": "printf", "data": "ready\n"}


{"type": "map", "data": {"@longest": {"15381": 23871}}}
{"type": "map", "data": {"@now": 86006552849646}}
{"type": "map", "data": {"@since": {"15381": 86006470969273}}}
{"type": "map", "data": {"@us": {"15381,python,\n    __schedule+1560\n    schedule+35\n    do_sleep+94\n": 11638677}}}
{"type": "map", "data": {"@where": {"15381": "\n        __schedule+1560\n        schedule+35\n"}}}
{"type": "map", "data": {"@who": {"15381": "python"}}}
"""
RUNQUEUE = r"""{"type": "map", "data": {"@longest": {"15381": 2134}}}
{"type": "hist", "data": {"@waits": [{"max": 0, "count": 1}, {"min": 8, "max": 15, "count": 16}]}}
{"type": "hist", "data": {"@other": [{"min": 1024, "max": 2047, "count": 3}]}}
"""


def test_what_bpftrace_prints_is_read_map_by_map() -> None:
    maps = parse(OFFCPU)
    assert maps.table("@longest") == {"15381": 23871}
    assert maps.values == {"@now": 86006552849646}
    assert maps.texts("@who") == {"15381": "python"}
    ((key, us),) = maps.table("@us").items()
    assert us == 11638677
    numbers, (name, stack) = split_key(key, 1)
    assert (numbers, name) == ([15381], "python")
    assert frames(stack) == ("do_sleep", "schedule", "__schedule")
    assert maps.notes == ()


def test_a_name_with_commas_does_not_move_a_keys_parts() -> None:
    key = "9,7,a,b,\n    f(int, char)+1\n    main+2\n,\n    g+3\n"
    numbers, (name, user, kernel) = split_key(key, 2)
    assert (numbers, name) == ([9, 7], "a,b")
    assert (frames(user), frames(kernel)) == (("main", "f(int, char)"), ("g",))


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("9,python,\n    add+1\n,", ["python", ("add",), ()]),  # no kernel stack, as recorded
        ("9,python,,\n    g+3\n", ["python", ("g",)]),
        ("9,python,,", ["python"]),
    ],
)
def test_a_stack_without_frames_adds_none(key: str, parts: list[object]) -> None:
    _, (name, *stacks) = split_key(key, 1)
    assert [name, *map(frames, stacks)] == parts


def test_histograms_are_told_in_milliseconds() -> None:
    maps = parse(RUNQUEUE)
    assert maps.histograms["@waits"] == (Bucket(0.0, 1), Bucket(0.008, 16))
    assert maps.histograms["@other"] == (Bucket(1.024, 3),)


def test_what_was_lost_is_a_note() -> None:
    maps = parse(
        '{"type": "lost_events", "data": {"events": 12}}\nnonsense\n',
        "ERROR: Unknown error -1: couldn't set RLIMIT_MEMLOCK for bpftrace. If your program is not loading, try\n"
        "WARNING: Failed to map_update_elem: No space left on device\n",
    )
    assert maps.notes == (
        "bpftrace: WARNING: Failed to map_update_elem: No space left on device",
        "the kernel lost 12 events: the figures are too low",
        "bpftrace said something unreadable: nonsense",
    )
