"""Logs of Mooncake, and output of nccl-tests.

Over TCP the logs are real: ``mooncake/*.txt`` is what the engine that writes had to say
(mooncake-transfer-engine-non-cuda 0.3.13.post1, between two network namespaces, 8 MiB a transfer). In ``healthy``
nothing went wrong; in ``cut`` every packet was lost from some moment on; in ``gone`` the peer's process was killed.
``test_mooncake`` makes such logs anew.

Over RDMA, which takes an adapter, they are lines that users have published (issues 397, 507, 1088 and 1450 of
github.com/kvcache-ai/Mooncake). What nccl-tests print is taken from their documentation (github.com/NVIDIA/nccl-tests,
README.md and doc/PERFORMANCE.md): it takes two GPUs to make it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hwprobe.doctor import Unable, mooncake, nccl

REAL = Path(__file__).with_name("mooncake")
SLICE = (
    "E0603 20:16:59.104586 27322 worker_pool.cpp:271] Worker: Process failed for slice (opcode: 1, source_addr: "
    "0x7f20fe0f1680, length: 65536, dest_addr: 0x7f3d820f3a80, local_nic: mlx5_7, peer_nic: {peer}@mlx5_0, dest_rkey: "
    "2116517, retry_cnt: 0): {status}\n"
)
AGAIN = "W0523 06:50:40.064657   223 client.cpp:450] Transfer incomplete, retrying... (attempt 2/3)\n"
OVER = (
    "E1120 11:10:27.133715 203020 transfer_task.cpp:305] Failed to complete transfers after 60 seconds for batch 25\n"
)
ORDINARY = "I20251113 17:04:35.119301 22885017610048 client_metric.cpp:76] Client metrics enabled (default enabled)\n"


def log(place: Path, *lines: str) -> Path:
    path = place / "engine-0.log"
    path.write_text("".join(lines))
    return path


def test_a_log_without_trouble_is_healthy(tmp_path: Path) -> None:
    chatter = (
        "they say: Worker: Process failed for slice (local_nic: a, peer_nic: b,): transport retry counter exceeded\n"
    )
    examined = mooncake.look([log(tmp_path, ORDINARY, chatter)])
    assert examined.findings == []
    assert examined.notes == ["1 log: 0 slices failed, 0 retries"]


def test_retransmissions_are_counted_for_each_pair_of_cards(tmp_path: Path) -> None:
    lines = [
        SLICE.format(peer=f"10.93.81.13:{port}", status="transport retry counter exceeded") for port in (15729, 15695)
    ]
    examined = mooncake.look([log(tmp_path, *lines, ORDINARY)])
    (finding,) = examined.findings
    assert (finding.severity, finding.subject) == ("error", "mlx5_7 -> 10.93.81.13@mlx5_0")
    assert finding.evidence == ("2 slices failed from mlx5_7 to 10.93.81.13@mlx5_0: transport retry counter exceeded")
    assert "MC_GID_INDEX" in finding.remedy


def test_other_failures_are_not_taken_for_retransmissions(tmp_path: Path) -> None:
    refused = SLICE.format(peer="115.182.224.13:15004", status="local protection error")
    busy = SLICE.format(peer="115.182.224.13:15004", status="RNR retry counter exceeded")
    first, second = mooncake.look([log(tmp_path, refused, busy, busy)]).findings
    assert (first.severity, second.severity) == ("error", "warning")
    assert "no buffer ready" in first.cause
    assert second.evidence.endswith(": local protection error")


def test_transfers_that_were_begun_again_are_found(tmp_path: Path) -> None:
    (finding,) = mooncake.look([log(tmp_path, AGAIN, AGAIN, OVER)]).findings
    assert finding.evidence == "2 were begun again, 1 given up after their time"


def test_what_a_healthy_engine_logs_over_tcp_is_no_finding() -> None:
    examined = mooncake.look([REAL / "healthy.txt"])  # with two warnings and an error, which every engine begins with
    assert examined.findings == []


def test_a_way_that_carries_nothing_any_longer_is_told_from_a_peer_that_is_gone() -> None:
    still, given_up = sorted(mooncake.look([REAL / "cut.txt"]).findings, key=lambda finding: finding.subject)
    assert (still.severity, still.subject, still.evidence) == (
        "error",
        "TCP connections",
        "4 stood still for 30 s and were closed",
    )
    assert "loss, mtu" in still.remedy
    assert given_up.evidence == "0 were begun again, 1 given up after their time"
    refused, broken = sorted(mooncake.look([REAL / "gone.txt"]).findings, key=lambda finding: finding.subject)
    assert (refused.severity, refused.subject) == ("error", "10.208.40.2:15565")
    assert refused.evidence == "16 connections to 10.208.40.2:15565 failed, the last: Connection refused"
    assert "--peer tcp://10.208.40.2:15565" in refused.remedy
    assert (broken.severity, broken.evidence) == ("warning", "4 ended within a transfer: Connection reset by peer")


def test_without_logs_there_is_nothing_to_read() -> None:
    with pytest.raises(Unable, match="--mooncake-log"):
        mooncake.look([])


GOOD = """\
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
   134217728      33554432     float     sum      -1    539.2  248.92  435.61      0    538.1  249.43  436.50      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : {speed}
#
"""


def test_the_bandwidth_that_nccl_tests_print_is_judged_by_what_connects_the_gpus() -> None:
    examined = nccl.judge(GOOD.format(speed="436.055"), "", 0, linked=True)
    assert (examined.findings, examined.notes) == ([], ["all-reduce: 436.055 GB/s"])
    (finding,) = nccl.judge(GOOD.format(speed="38.1"), "", 0, linked=True).findings
    assert (finding.severity, finding.evidence) == ("warning", "expected 100 GB/s or more over NVLink, found 38.1 GB/s")
    assert nccl.judge(GOOD.format(speed="38.1"), "", 0, linked=False).findings == []


def test_wrong_values_and_failures_of_nccl_tests_are_errors() -> None:
    wrong = GOOD.replace(": 0 OK", ": 12 FAILED").format(speed="436.055")
    (finding,) = nccl.judge(wrong, "", 0, linked=True).findings
    assert (finding.severity, finding.evidence) == ("error", "12 wrong values in an all-reduce")
    (finding,) = nccl.judge("", "Test NCCL failure common.cu:958 'unhandled system error'\n", 3, linked=False).findings
    assert "unhandled system error" in finding.evidence


def test_nccl_tests_are_run_on_all_gpus_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / nccl.COMMAND
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program.write_text('#!/bin/sh\n[ "$*" = "-b 128M -e 128M -n 5 -w 2 -g 4" ] && echo "# Avg bus bandwidth : 44.5"\n')
    program.chmod(0o755)
    assert nccl.look(4, linked=False).notes == ["all-reduce: 44.5 GB/s"]
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(nccl, "LIMIT_S", 0.2)
    (finding,) = nccl.look(4, linked=False).findings
    assert "did not end within 0.2 s" in finding.evidence


def test_one_gpu_has_nobody_to_talk_to() -> None:
    with pytest.raises(Unable, match="two GPUs"):
        nccl.look(1, linked=False)
