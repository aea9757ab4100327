"""GPUs through the real bindings over a fake NVML: what is found, and the map that follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from hwprobe import AffinityMap, Finding
from tests.hwprobe.conftest import ProbeWithFake
from tests.hwprobe.trees import small_machine, two_sockets, write

H800 = "NVIDIA H800|81559"
H20 = "NVIDIA H20|97871"
L40S = "NVIDIA L40S|46068"
NEAR = "0-55,112-167;56-111,168-223"
PAIR_RIDGE = 104.5409  # sqrt(148/4.0 * 989.5/3.35), the middle of H20 and H800


def golden(name: str) -> Any:
    return yaml.safe_load((Path(__file__).parent / "golden" / f"{name}.yaml").read_text())


def without_reference(affinity: AffinityMap, ridge: float = PAIR_RIDGE) -> Any:
    tree = msgspec.json.decode(msgspec.json.encode(affinity))
    assert tree.pop("reference_ridge") == pytest.approx(ridge, abs=1e-3)
    return tree


def eight(gpu: str) -> str:
    return ";".join([gpu] * 8)


@pytest.mark.parametrize(("gpu", "links", "expected"), [(H800, "8", "8xh800"), (H20, "18", "8xh20")])
def test_eight_gpus_on_nvswitch_give_the_map_written_by_hand(
    probe_with_fake: ProbeWithFake, tmp_path: Path, gpu: str, links: str, expected: str
) -> None:
    answer = probe_with_fake(two_sockets(tmp_path), gpus=eight(gpu), cpus=NEAR, links=links, ends="switch")
    assert without_reference(answer.affinity) == golden(expected)
    assert answer.hardware.driver == "550.54.15"
    assert [gpu.nvlinks for gpu in answer.hardware.gpus] == [int(links)] * 8
    assert [gpu.pci_bus_id for gpu in answer.hardware.gpus][:2] == ["0000:08:00.0", "0000:10:00.0"]
    assert not any(gpu.mig for gpu in answer.hardware.gpus)


def test_a_node_of_two_pcie_boards_gives_the_map_written_by_hand(
    probe_with_fake: ProbeWithFake, tmp_path: Path
) -> None:
    gpus = ";".join([L40S] * 4 + ["NVIDIA A100 80GB PCIe|81920"] * 4)
    answer = probe_with_fake(two_sockets(tmp_path), gpus=gpus, cpus=NEAR, values="*:nvmlDeviceGetP2PStatus:5")
    assert without_reference(answer.affinity, 259.935) == golden("mixed_pcie")
    assert {path.reason for gpu in answer.hardware.gpus for path in gpu.paths} == {"not supported"}


def test_a_mixed_node_is_split_by_the_ridge_points_of_its_pool(probe_with_fake: ProbeWithFake, tmp_path: Path) -> None:
    answer = probe_with_fake(two_sockets(tmp_path), gpus=";".join([H800] * 4 + [H20] * 4))
    kinds = {pool.hardware_class: pool.kind for pool in answer.affinity.pools}
    assert kinds == {"H800": "compute", "H20": "bandwidth", "CPU": None}
    assert answer.affinity.devices[0].roles[0] == "train"
    assert answer.affinity.devices[7].roles[0] == "decode"


def test_a_lost_gpu_is_a_finding_and_shifts_no_index(probe_with_fake: ProbeWithFake, tmp_path: Path) -> None:
    answer = probe_with_fake(
        two_sockets(tmp_path),
        gpus=eight(H800),
        links="8",
        faults="3:nvmlDeviceGetHandleByIndex_v2:15;5:nvmlDeviceGetMemoryInfo:15",  # NVML_ERROR_GPU_IS_LOST
        cpus=NEAR,
    )
    assert [gpu.index for gpu in answer.hardware.gpus] == [0, 1, 2, 4, 6, 7]
    assert answer.affinity.devices[0].peers == ("gpu1", "gpu2", "gpu4", "gpu6", "gpu7")
    assert [(one.code, one.severity, one.subjects) for one in answer.affinity.findings] == [
        ("lost", "error", ("gpu3", "gpu5"))
    ]


def test_an_unsupported_query_leaves_its_field_empty_and_the_gpu_usable(
    probe_with_fake: ProbeWithFake, tmp_path: Path
) -> None:
    answer = probe_with_fake(
        two_sockets(tmp_path),
        gpus=f"{L40S};{L40S}",
        cpus=NEAR,
        faults="*:nvmlDeviceGetMigMode:3;1:nvmlDeviceGetMemoryInfo:3;0:nvmlDeviceGetUUID:4",
    )
    first, second = answer.hardware.gpus
    assert first.mig is None
    assert second.memory_bytes is None
    assert first.uuid is None
    assert first.nvlinks == 0
    assert answer.affinity.devices[1].memory_bytes == 48 << 30  # the data sheet's, for want of the driver's
    assert set(answer.hardware.findings) == {
        Finding("unsupported", "info", ("gpu0", "gpu1"), "no answer to nvmlDeviceGetMigMode: Not Supported"),
        Finding("unsupported", "info", ("gpu1",), "no answer to nvmlDeviceGetMemoryInfo: Not Supported"),
        Finding("denied", "warning", ("gpu0",), "no answer to nvmlDeviceGetUUID: Insufficient Permissions"),
    }


def test_a_gpu_that_this_process_may_not_open_is_left_out(probe_with_fake: ProbeWithFake, tmp_path: Path) -> None:
    answer = probe_with_fake(
        two_sockets(tmp_path), gpus=f"{H20};{H20}", cpus=NEAR, faults="0:nvmlDeviceGetHandleByIndex_v2:4"
    )
    assert [gpu.index for gpu in answer.hardware.gpus] == [1]
    assert [(one.code, one.subjects) for one in answer.hardware.findings] == [("denied", ("gpu0",))]


@pytest.mark.parametrize("ends", ["pair", "pair-untyped"])
def test_bridged_pairs_are_each_others_only_peers(probe_with_fake: ProbeWithFake, tmp_path: Path, ends: str) -> None:
    gpus = ";".join(["NVIDIA A100 80GB PCIe|81920"] * 4)
    answer = probe_with_fake(two_sockets(tmp_path), gpus=gpus, cpus=NEAR, links="12", ends=ends)
    assert [gpu.nvlink_peers for gpu in answer.hardware.gpus] == [(1,), (0,), (3,), (2,)]


def test_a_bridge_to_a_lost_gpu_leaves_no_peer(probe_with_fake: ProbeWithFake, tmp_path: Path) -> None:
    gpus = ";".join(["NVIDIA A100 80GB PCIe|81920"] * 2)
    answer = probe_with_fake(
        two_sockets(tmp_path), gpus=gpus, cpus=NEAR, links="12", ends="pair", faults="1:nvmlDeviceGetName:15"
    )
    assert [(gpu.nvlinks, gpu.nvlink_peers) for gpu in answer.hardware.gpus] == [(12, ())]


@pytest.mark.parametrize("call", ["nvmlDeviceGetUUID", "nvmlDeviceGetPowerUsage"])
def test_a_hung_call_costs_its_gpu_and_its_time_limit_and_names_itself(
    probe_with_fake: ProbeWithFake, tmp_path: Path, call: str
) -> None:
    answer = probe_with_fake(
        two_sockets(tmp_path), gpus=eight(H20), cpus=NEAR, faults=f"2:{call}:hang", query_timeout_s=3.0
    )
    assert [gpu.index for gpu in answer.hardware.gpus] == [0, 1, 3, 4, 5, 6, 7]
    assert answer.seconds < 15  # of 30 that the driver may take to start
    (finding,) = answer.hardware.findings
    assert (finding.code, finding.severity, finding.subjects) == ("timed_out", "error", ("gpu2",))
    assert call in finding.detail


def test_a_driver_that_does_not_start_in_time_leaves_the_rest_of_the_map(
    probe_with_fake: ProbeWithFake, tmp_path: Path
) -> None:
    answer = probe_with_fake(
        two_sockets(tmp_path), gpus=eight(H20), faults="-:nvmlInitWithFlags:hang", nvml_timeout_s=2
    )
    (finding,) = answer.hardware.findings
    assert (finding.code, finding.subjects) == ("timed_out", ("nvml",))
    assert "nvmlInit" in finding.detail
    assert [device.id for device in answer.affinity.devices] == ["cpu"]


AWAKE = {"driver/nvidia/gpus/0000:08:00.0/information": "Model: NVIDIA H20"}


@pytest.mark.parametrize("call", ["-:nvmlInitWithFlags", "-:nvmlSystemGetDriverVersion", "0:nvmlDeviceGetUUID"])
def test_a_call_that_hangs_costs_no_more_than_the_probe_promises(
    probe_with_fake: ProbeWithFake, tmp_path: Path, call: str
) -> None:
    """Whichever it is, with the time limits that everybody has; a persistence daemon keeps the GPUs awake."""
    sysfs, proc, facts = two_sockets(tmp_path)
    write(proc, AWAKE)
    write(proc.parent / "run", {"nvidia-persistenced/socket": ""})
    answer = probe_with_fake((sysfs, proc, facts), gpus=H20, faults=f"{call}:hang", nvml_timeout_s=None)
    assert answer.hardware.gpus == ()
    (finding,) = answer.hardware.findings
    assert (finding.code, finding.severity) == ("timed_out", "error")
    assert call.partition(":")[2].removesuffix("WithFlags") in finding.detail
    assert answer.seconds < 9.0  # less than a sleeping driver would be given, on however busy a machine


def test_a_driver_that_may_sleep_is_given_the_time_to_wake_up(probe_with_fake: ProbeWithFake, tmp_path: Path) -> None:
    sysfs, proc, facts = two_sockets(tmp_path)
    write(proc, AWAKE)
    answer = probe_with_fake((sysfs, proc, facts), gpus=H20, init_ms="1500", nvml_timeout_s=None)
    assert [gpu.index for gpu in answer.hardware.gpus] == [0]


def test_ways_that_hang_cost_no_gpu(probe_with_fake: ProbeWithFake, tmp_path: Path) -> None:
    faults = "1:nvmlDeviceGetP2PStatus:hang"
    answer = probe_with_fake(
        two_sockets(tmp_path), gpus=";".join([H20] * 3), cpus=NEAR, faults=faults, query_timeout_s=3.0
    )
    assert [[path.p2p for path in gpu.paths] for gpu in answer.hardware.gpus] == [
        [True, True],
        [True, None],
        [True, None],
    ]
    assert [(one.code, one.subjects) for one in answer.hardware.findings] == [("timed_out", ("gpu1",))]


@pytest.mark.parametrize(
    ("error", "code"),
    [("9", "driver_not_loaded"), ("12", "no_driver"), ("18", "driver_mismatch"), ("999", "driver_failed")],
)
def test_a_driver_that_does_not_start_is_told_by_its_reason(
    probe_with_fake: ProbeWithFake, tmp_path: Path, error: str, code: str
) -> None:
    answer = probe_with_fake(small_machine(tmp_path), gpus=H800, faults=f"-:nvmlInitWithFlags:{error}")
    assert answer.hardware.gpus == ()
    assert [finding.code for finding in answer.hardware.findings] == [code]


def test_a_machine_of_two_cores_without_gpu_gives_the_map_written_by_hand(
    probe_with_fake: ProbeWithFake, tmp_path: Path
) -> None:
    answer = probe_with_fake(small_machine(tmp_path), faults="-:nvmlInitWithFlags:12")
    assert without_reference(answer.affinity) == golden("two_cores")


def test_a_missing_driver_is_a_warning_where_nvidia_cards_are_on_the_bus(
    probe_with_fake: ProbeWithFake, tmp_path: Path
) -> None:
    tree = small_machine(tmp_path)
    bus = "bus/pci/devices"
    write(tree[0], {f"{bus}/0000:08:00.0/vendor": "0x10de", f"{bus}/0000:08:00.0/class": "0x030200"})
    write(tree[0], {f"{bus}/0000:09:00.0/vendor": "0x10de", f"{bus}/0000:09:00.0/class": "0x040300"})  # its sound
    answer = probe_with_fake(tree, faults="-:nvmlInitWithFlags:12")
    (finding,) = answer.hardware.findings
    assert (finding.code, finding.severity, finding.subjects) == ("no_driver", "warning", ("0000:08:00.0",))


@pytest.mark.parametrize(
    ("visible", "seen"),
    [("2,0", [0, 2]), ("GPU-00000003", [3]), ("1,9,2", [1]), ("", []), ("-1", [])],
)
def test_cuda_visible_devices_hides_gpus(
    probe_with_fake: ProbeWithFake, tmp_path: Path, visible: str, seen: list[int]
) -> None:
    gpus = ";".join([H800] * 4)
    answer = probe_with_fake(two_sockets(tmp_path), gpus=gpus, cpus=NEAR, links="8", visible=visible)
    assert [gpu.index for gpu in answer.hardware.gpus] == seen
    assert all(set(gpu.nvlink_peers) == set(seen) - {gpu.index} for gpu in answer.hardware.gpus)
    (finding,) = answer.hardware.findings
    assert finding.code == "hidden"
    assert finding.subjects == tuple(f"gpu{index}" for index in range(4) if index not in seen)


def test_without_a_node_on_the_bus_the_near_cpus_tell_it(probe_with_fake: ProbeWithFake, tmp_path: Path) -> None:
    tree = two_sockets(tmp_path)
    for index in range(8):
        write(tree[0], {f"bus/pci/devices/0000:{8 * (index + 1):02x}:00.0/numa_node": "-1"})
    told = probe_with_fake(tree, gpus=eight(H800), cpus=NEAR)
    assert [gpu.numa_node for gpu in told.hardware.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    untold = probe_with_fake(tree, gpus=eight(H800))
    assert [gpu.numa_node for gpu in untold.hardware.gpus] == [None] * 8
    assert {device.cpus for device in untold.affinity.gpus} == {"0-223"}
    assert "numa_unknown" in {finding.code for finding in untold.hardware.findings}


def test_mig_is_told(probe_with_fake: ProbeWithFake, tmp_path: Path) -> None:
    answer = probe_with_fake(two_sockets(tmp_path), gpus=H800, cpus="0-55", mig="1")
    assert answer.hardware.gpus[0].mig is True
    assert [finding.code for finding in answer.hardware.findings] == ["mig_enabled"]
