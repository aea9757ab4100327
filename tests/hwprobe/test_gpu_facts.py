"""A GPU's facts through the real bindings over a fake NVML: figures, the ways between GPUs, slices, and symptoms."""

from __future__ import annotations

from pathlib import Path

import pytest

from hwprobe import Clocks, Device, Ecc, GpuPath, GpuProcess, GpuProfile, PcieLink, Power, ResourceProfile
from tests.hwprobe.conftest import ProbeWithFake
from tests.hwprobe.trees import links, small_machine, two_sockets, write

H800 = "NVIDIA H800|81559"
A100 = "NVIDIA A100-SXM4-80GB|81920"
NEAR = "0-55,112-167;56-111,168-223"
MIB = 1 << 20


def test_every_figure_of_a_busy_gpu_is_told(probe_with_fake: ProbeWithFake, tmp_path: Path) -> None:
    values = ";".join(
        [
            "0:nvmlDeviceGetClockInfo.1:1755",
            "0:nvmlDeviceGetPowerUsage:689500",
            "0:nvmlDeviceGetTemperature:64",
            "0:nvmlDeviceGetCurrentClocksThrottleReasons:0x4",
            "0:nvmlDeviceGetTotalEccErrors.0:3",
            "0:nvmlDeviceGetEnforcedPowerLimit:690000",
        ]
    )
    answer = probe_with_fake(
        small_machine(tmp_path), cpus="0-1", gpus=H800, values=values, processes="0:4711:70000;0:4712:512"
    )
    (gpu,) = answer.hardware.gpus
    # 16,896 CUDA cores of 128 a multiprocessor; clocks in MHz, power in mW on the way.
    assert (gpu.sms, gpu.compute_capability, gpu.temperature_c) == (132, "9.0", 64)
    assert gpu.clocks == Clocks(sm_hz=1755e6, sm_max_hz=1980e6, memory_hz=2619e6, memory_max_hz=2619e6)
    assert gpu.power == Power(draw_w=689.5, limit_w=690.0, default_w=700.0)
    assert gpu.throttled_by == ("power_cap",)
    assert gpu.ecc == Ecc(enabled=True, corrected=3, uncorrected=0, remap_pending=False, remap_failed=False)
    assert gpu.pcie == PcieLink(generation=5, width=16, max_generation=5, max_width=16)
    assert gpu.processes == (GpuProcess(4711, 70000 * MIB), GpuProcess(4712, 512 * MIB))
    assert answer.hardware.findings == ()  # a power cap at full load and corrected errors are nothing to worry about


def test_an_idle_gpu_that_saves_power_has_no_finding(probe_with_fake: ProbeWithFake, tmp_path: Path) -> None:
    values = "0:nvmlDeviceGetClockInfo.1:345;0:nvmlDeviceGetCurrPcieLinkGeneration:1;0:nvmlDeviceGetEccMode:0"
    answer = probe_with_fake(small_machine(tmp_path), cpus="0-1", gpus=H800, values=values)
    (gpu,) = answer.hardware.gpus
    assert (gpu.throttled_by, gpu.ecc, gpu.pcie.generation) == ((), Ecc(enabled=False), 1)
    assert answer.hardware.findings == ()


@pytest.mark.parametrize(
    ("values", "code", "words"),
    [
        (
            "1:nvmlDeviceGetCurrentClocksThrottleReasons:0x48;1:nvmlDeviceGetClockInfo.1:990",
            "throttled",
            "hardware_slowdown, hardware_thermal, at 990 of 1980 MHz",
        ),
        ("1:nvmlDeviceGetTotalEccErrors.1:2", "memory_errors", "2 uncorrected errors"),
        ("1:nvmlDeviceGetRemappedRows.2:1", "memory_errors", "waits for a reset"),
        ("1:nvmlDeviceGetRemappedRows.3:1", "memory_errors", "could not be replaced"),
        ("1:nvmlDeviceGetCurrPcieLinkWidth:8", "narrow_link", "8 lanes, 16 are there"),
    ],
)
def test_what_is_wrong_with_a_gpu_that_answers_is_a_finding_about_it(
    probe_with_fake: ProbeWithFake, tmp_path: Path, values: str, code: str, words: str
) -> None:
    answer = probe_with_fake(two_sockets(tmp_path), gpus=f"{H800};{H800}", cpus=NEAR, values=values)
    (finding,) = answer.affinity.findings
    severity = "error" if code == "memory_errors" else "warning"
    assert (finding.code, finding.severity, finding.subjects) == (code, severity, ("gpu1",))
    assert words in finding.detail
    assert finding.remedy
    assert [device.id for device in answer.affinity.gpus] == ["gpu0", "gpu1"]  # it goes on being used


def test_a_query_that_is_not_supported_costs_its_own_figure(probe_with_fake: ProbeWithFake, tmp_path: Path) -> None:
    faults = "0:nvmlDeviceGetEccMode:3;0:nvmlDeviceGetPowerUsage:3;0:nvmlDeviceGetCurrentClocksThrottleReasons:13"
    answer = probe_with_fake(small_machine(tmp_path), cpus="0-1", gpus=H800, faults=faults)
    (gpu,) = answer.hardware.gpus
    assert (gpu.ecc, gpu.power.draw_w, gpu.throttled_by) == (None, None, None)
    assert gpu.power.limit_w == 700.0
    assert {(one.code, one.severity, one.detail) for one in answer.hardware.findings} == {
        ("unsupported", "info", "no answer to nvmlDeviceGetEccMode: Not Supported"),
        ("unsupported", "info", "no answer to nvmlDeviceGetPowerUsage: Not Supported"),
        ("unsupported", "info", "no answer to nvmlDeviceGetCurrentClocksThrottleReasons: Function Not Found"),
    }


def test_gpus_on_nvswitch_reach_each_other_by_all_their_links(probe_with_fake: ProbeWithFake, tmp_path: Path) -> None:
    answer = probe_with_fake(two_sockets(tmp_path), gpus=";".join([H800] * 4), cpus=NEAR, links="8", ends="switch")
    assert answer.hardware.gpus[1].paths == (
        GpuPath(peer=0, level="PIX", nvlinks=8, p2p=True),
        GpuPath(peer=2, level="SYS", nvlinks=8, p2p=True),
        GpuPath(peer=3, level="SYS", nvlinks=8, p2p=True),
    )
    assert answer.affinity.peer_groups == (("node-a/gpu0", "node-a/gpu1", "node-a/gpu2", "node-a/gpu3"),)


def test_bridged_pairs_are_groups_of_two(probe_with_fake: ProbeWithFake, tmp_path: Path) -> None:
    gpus = ";".join(["NVIDIA A100 80GB PCIe|81920"] * 4)
    answer = probe_with_fake(two_sockets(tmp_path), gpus=gpus, cpus=NEAR, links="12", ends="pair")
    assert answer.affinity.peer_groups == (("node-a/gpu0", "node-a/gpu1"), ("node-a/gpu2", "node-a/gpu3"))
    assert [path.nvlinks for path in answer.hardware.gpus[3].paths] == [0, 0, 12]


def test_gpus_that_may_not_read_each_others_memory_say_why(probe_with_fake: ProbeWithFake, tmp_path: Path) -> None:
    gpus = ";".join(["NVIDIA GeForce RTX 4090|24564"] * 2)
    answer = probe_with_fake(two_sockets(tmp_path), gpus=gpus, cpus=NEAR, values="0:nvmlDeviceGetP2PStatus:1")
    assert answer.hardware.gpus[0].paths == (
        GpuPath(peer=1, level="PIX", p2p=False, reason="the chipset does not support it"),
    )
    assert answer.affinity.peer_groups == ()


def test_a_gpu_with_fewer_links_than_its_kind_is_told(probe_with_fake: ProbeWithFake, tmp_path: Path) -> None:
    faults = "1:nvmlDeviceGetNvLinkState:2"  # as if it had none
    answer = probe_with_fake(
        two_sockets(tmp_path), gpus=";".join([H800] * 3), cpus=NEAR, links="8", ends="switch", faults=faults
    )
    (finding,) = answer.hardware.findings
    assert (finding.code, finding.subjects) == ("links_missing", ("gpu1",))
    assert "0 active NVLinks, 8 on others" in finding.detail
    assert answer.affinity.peer_groups == (("node-a/gpu0", "node-a/gpu2"),)


SLICES = "0:3g.40gb|40192|42;0:2g.20gb|19968|28;0:1g.10gb|9728|14"


def rows(devices: tuple[Device, ...]) -> list[tuple[object, ...]]:
    return [
        (device.id, device.hardware_class, device.kind, device.roles[:1], device.memory_bytes // MIB, device.uuid)
        for device in devices
        if device.id != "cpu"
    ]


def test_a_gpu_in_slices_is_mapped_as_these_by_their_shares(probe_with_fake: ProbeWithFake, tmp_path: Path) -> None:
    answer = probe_with_fake(small_machine(tmp_path), cpus="0-1", gpus=f"{A100};{A100}", mig="1", slices=SLICES)
    # An A100 has 108 multiprocessors (6,912 cores), 312 TFLOP/s, 2.039 TB/s. Shares of compute 42/108, 28/108 and
    # 14/108, of memory 40192/81920, 19968/81920 and 9728/81920. Ridge points 121.3, 162.8, 167.0; middle 142.3.
    assert rows(answer.affinity.devices) == [
        ("gpu0.0", "A100-3g.40gb", "bandwidth", ("decode",), 40192, "MIG-00000000-0000-0000-0000-000000000000"),
        ("gpu0.1", "A100-2g.20gb", "compute", ("train",), 19968, "MIG-00000000-0000-0000-0000-000000000001"),
        ("gpu0.2", "A100-1g.10gb", "compute", ("train",), 9728, "MIG-00000000-0000-0000-0000-000000000002"),
        ("gpu1", "A100", "compute", (), 81920, "GPU-00000001-0000-0000-0000-000000000000"),
    ]
    assert [device.peak_bf16_flops for device in answer.affinity.devices[:3]] == pytest.approx(
        [121.3333e12, 80.88889e12, 40.44444e12], rel=1e-6
    )
    assert [device.bandwidth for device in answer.affinity.devices[:3]] == pytest.approx(
        [1.000384375e12, 0.49700625e12, 0.24213125e12]
    )
    assert answer.affinity.reference_ridge == pytest.approx(142.33, abs=0.01)
    assert [device.cuda_name for device in answer.affinity.devices] == [
        "MIG-00000000-0000-0000-0000-000000000000",
        "MIG-00000000-0000-0000-0000-000000000001",
        "MIG-00000000-0000-0000-0000-000000000002",
        "1",
        "",
    ]
    assert answer.affinity.hosts[0].numa[0].devices == ("gpu0.0", "gpu0.1", "gpu0.2", "gpu1")
    assert [(one.code, one.severity, one.subjects) for one in answer.affinity.findings] == [
        ("mig_enabled", "info", ("gpu0",)),
        ("mig_enabled", "warning", ("gpu1",)),
    ]


def test_a_slice_takes_the_figures_that_the_profile_has_for_its_class(
    probe_with_fake: ProbeWithFake, tmp_path: Path
) -> None:
    profile = ResourceProfile(gpus={"A100-1g.10gb": GpuProfile(count=1, bf16_tflops=30, mem_per_gpu=8)})
    slices = "0:1g.10gb|9728|14;0:1g.10gb|9728|14"
    answer = probe_with_fake(small_machine(tmp_path), cpus="0-1", gpus=A100, mig="1", slices=slices, profile=profile)
    first, second = answer.affinity.devices[:2]
    assert (first.peak_bf16_flops, first.memory_bytes) == (30e12, 8 << 30)
    assert second.roles == ()


def test_cuda_visible_devices_names_slices(probe_with_fake: ProbeWithFake, tmp_path: Path) -> None:
    answer = probe_with_fake(
        small_machine(tmp_path),
        cpus="0-1",
        gpus=f"{A100};{A100}",
        mig="1",
        slices=SLICES,
        visible="MIG-00000000-0000-0000-0000-000000000001",
    )
    assert [device.id for device in answer.affinity.gpus] == ["gpu0.1"]
    assert ("hidden", ("gpu1",)) in [(one.code, one.subjects) for one in answer.affinity.findings]


def test_interfaces_are_ordered_by_their_way_on_the_pci_bus(probe_with_fake: ProbeWithFake, tmp_path: Path) -> None:
    """One host bridge with two switches: the GPU and mlx0 below one of them, mlx1 below the other, which is faster."""
    tree = small_machine(tmp_path)
    root = "devices/pci0000:00"
    gpu = f"{root}/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:08:00.0"
    near = f"{root}/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:09:00.0"
    far = f"{root}/0000:00:02.0/0000:03:00.0/0000:04:00.0/0000:0a:00.0"
    write(tree[0], {f"{place}/class": "0x030200" for place in (gpu, near, far)})
    nics = {"mlx0": (near, "100000"), "mlx1": (far, "400000")}
    for name, (_, speed) in nics.items():
        write(tree[0], {f"class/net/{name}/operstate": "up", f"class/net/{name}/speed": speed})
    links(tree[0], {f"bus/pci/devices/{place.rpartition('/')[2]}": place for place in (gpu, near, far)})
    links(tree[0], {f"class/net/{name}/device": place for name, (place, _) in nics.items()})
    answer = probe_with_fake(tree, cpus="0-1", gpus=H800)
    (found,) = answer.hardware.gpus
    assert [(path.nic, path.level) for path in found.nic_paths] == [("mlx0", "PIX"), ("mlx1", "PHB")]
    assert answer.affinity.devices[0].nics == ("mlx0", "mlx1", "eth0")


def test_a_gpu_that_is_lost_between_two_questions_keeps_what_was_told(
    probe_with_fake: ProbeWithFake, tmp_path: Path
) -> None:
    answer = probe_with_fake(
        two_sockets(tmp_path), gpus=";".join([H800] * 3), cpus=NEAR, faults="0:nvmlDeviceGetP2PStatus:15"
    )
    assert [gpu.index for gpu in answer.hardware.gpus] == [0, 1, 2]
    assert [(one.code, one.subjects) for one in answer.hardware.findings] == [("lost", ("gpu0",))]
    assert [path.p2p for path in answer.hardware.gpus[1].paths] == [None, True]
