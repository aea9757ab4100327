"""The report for a terminal, of machines that this one is not."""

from __future__ import annotations

from pathlib import Path

from hwprobe.report import describe
from tests.hwprobe.conftest import ProbeWithFake
from tests.hwprobe.trees import small_machine, two_sockets

NEAR = "0-55,112-167;56-111,168-223"


def table(report: str, header: str) -> list[list[str]]:
    """The rows of the table whose header begins so, cell by cell."""
    lines = report.splitlines()
    start = next(place for place, line in enumerate(lines) if line.split()[:1] == [header])
    end = next((place for place in range(start, len(lines)) if not lines[place]), len(lines))
    return [line.split() for line in lines[start + 1 : end]]


def test_the_ways_between_gpus_are_a_matrix_as_nvidia_smi_writes_it(
    probe_with_fake: ProbeWithFake, tmp_path: Path
) -> None:
    gpus = ";".join(["NVIDIA A100 80GB PCIe|81920"] * 4)
    values = "2:nvmlDeviceGetP2PStatus:5"
    answer = probe_with_fake(two_sockets(tmp_path), gpus=gpus, cpus=NEAR, links="12", ends="pair", values=values)
    report = describe(answer.hardware, answer.affinity, ())
    # Pairs are bridged; the others are on two sockets; 2 and 3 may not read each other's memory (the star).
    assert table(report, "WAY") == [
        ["gpu0", "X", "NV12", "SYS", "SYS"],
        ["gpu1", "NV12", "X", "SYS", "SYS"],
        ["gpu2", "SYS", "SYS", "X", "NV12*"],
        ["gpu3", "SYS", "SYS", "NV12*", "X"],
    ]


def test_a_slowed_gpu_shows_its_state_and_its_finding(probe_with_fake: ProbeWithFake, tmp_path: Path) -> None:
    reasons, clock = "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetClockInfo.1"
    values = f"0:{reasons}:0x40;0:{clock}:990;0:nvmlDeviceGetTemperature:88;0:nvmlDeviceGetCurrPcieLinkGeneration:4"
    answer = probe_with_fake(
        small_machine(tmp_path), gpus="NVIDIA H800|81559", cpus="0-1", values=values, processes="0:4711:70000"
    )
    report = describe(answer.hardware, answer.affinity, ())
    (row,) = table(report, "GPU")
    assert " ".join(row) == (
        "gpu0 NVIDIA H800 132 9.0 990 of 1980 MHz 140 of 700 W 88 C on, 0 errors 4 x16 of 5 x16 hardware_thermal 1"
    )
    assert report.splitlines()[-1].startswith(
        "warning: gpu0: its clocks are held down: hardware_thermal, at 990 of 1980 MHz, 88 degrees Celsius"
    )


def test_slices_are_a_table_and_devices(probe_with_fake: ProbeWithFake, tmp_path: Path) -> None:
    answer = probe_with_fake(
        small_machine(tmp_path),
        gpus="NVIDIA A100-SXM4-80GB|81920",
        cpus="0-1",
        mig="1",
        slices="0:3g.40gb|40192|42;0:1g.10gb|9728|14",
    )
    report = describe(answer.hardware, answer.affinity, ())
    uuid = "MIG-00000000-0000-0000-0000-00000000000"
    assert table(report, "SLICE") == [
        ["gpu0.0", "3g.40gb", "42", "39.2", "GiB", f"{uuid}0"],
        ["gpu0.1", "1g.10gb", "14", "9.5", "GiB", f"{uuid}1"],
    ]
    assert [row[:2] for row in table(report, "DEVICE")] == [
        ["gpu0.0", "A100-3g.40gb"],
        ["gpu0.1", "A100-1g.10gb"],
        ["cpu", "CPU"],
    ]
