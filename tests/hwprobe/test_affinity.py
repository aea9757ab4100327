"""The affinity map as a pure function: profiles, NUMA policies, pools over several hosts, and its encoded size."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from hwprobe import (
    AffinityMap,
    Cpu,
    CpuProfile,
    Finding,
    Gpu,
    GpuProfile,
    Hardware,
    MapTooLarge,
    Memory,
    Nic,
    NumaNode,
    ProfileError,
    ResourceProfile,
    build_affinity_map,
    decode,
    encode,
    load_profile,
)
from hwprobe.hardware import coalesce
from hwprobe.roofline import hardware_class, lookup

GIB = 1 << 30


def host(name: str = "a", gpus: tuple[Gpu, ...] = (), *, nodes: int = 2, cpus_per_node: int = 8) -> Hardware:
    total = nodes * cpus_per_node
    return Hardware(
        host=name,
        cpu=Cpu(
            model="cpu",
            online=f"0-{total - 1}",
            allowed=f"0-{total - 1}",
            physical_cores=total,
            sockets=1,
            usable=total,
        ),
        memory=Memory(total_bytes=64 * GIB, usable_bytes=64 * GIB, host_available_bytes=60 * GIB),
        numa=tuple(
            NumaNode(node, f"{node * cpus_per_node}-{(node + 1) * cpus_per_node - 1}", 32 * GIB)
            for node in range(nodes)
        ),
        gpus=gpus,
    )


def gpus(name: str, count: int, gib: float = 80, start: int = 0) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(index=start + index, name=name, memory_bytes=int(gib * GIB), numa_node=(start + index) % 2)
        for index in range(count)
    )


def codes(affinity: AffinityMap) -> list[str]:
    return [finding.code for finding in affinity.findings]


# Dense bf16 TFLOP/s and TB/s, as on the vendors' data sheets.
@pytest.mark.parametrize(
    ("name", "expected_class", "tflops", "tb_s"),
    [
        ("NVIDIA H20", "H20", 148, 4.0),
        ("NVIDIA H800", "H800", 989.5, 3.35),
        ("NVIDIA H100 80GB HBM3", "H100", 989.5, 3.35),
        ("NVIDIA H100 PCIe", "H100", 756, 2.0),
        ("NVIDIA H200", "H200", 989.5, 4.8),
        ("NVIDIA A100-SXM4-80GB", "A100", 312, 2.039),
        ("NVIDIA A100-PCIE-40GB", "A100", 312, 1.555),
        ("NVIDIA B200", "B200", 2250, 8.0),
        ("NVIDIA L40S", "L40S", 362.05, 0.864),
        ("NVIDIA L20", "L20", 119.5, 0.864),
        ("NVIDIA GeForce RTX 4090", "RTX4090", 165.2, 1.008),
    ],
)
def test_known_devices_have_their_data_sheets_figures(
    name: str, expected_class: str, tflops: float, tb_s: float
) -> None:
    roofline = lookup(name)
    assert roofline is not None
    assert roofline.hardware_class == expected_class
    assert roofline.peak_bf16_flops == pytest.approx(tflops * 1e12)
    assert roofline.bandwidth == pytest.approx(tb_s * 1e12)


@pytest.mark.parametrize(
    ("name", "expected_class"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX4090Laptop"),
        ("NVIDIA GeForce RTX 4090 D", "RTX4090D"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA GH200 480GB", "GH200480GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA H800 NVL", "H800NVL"),
    ],
)
def test_a_neighbour_of_a_known_device_is_not_taken_for_it(name: str, expected_class: str) -> None:
    assert lookup(name) is None
    assert hardware_class(name) == expected_class


def test_an_unknown_gpu_has_no_kind_until_the_profile_gives_its_figures() -> None:
    unknown = build_affinity_map(host(gpus=gpus("NVIDIA X9", 1)))
    assert (unknown.devices[0].kind, unknown.devices[0].ridge) == (None, None)
    assert codes(unknown) == ["unknown_device"]
    assert "resource_profile.gpus.X9" in unknown.findings[0].remedy
    profile = ResourceProfile(gpus={"X9": GpuProfile(bf16_tflops=400, bandwidth_tb_s=2)})
    known = build_affinity_map(host(gpus=gpus("NVIDIA X9", 1)), profile)
    assert (known.devices[0].kind, known.devices[0].ridge) == ("compute", 200.0)
    assert codes(known) == []


def test_kinds_are_relative_to_the_pool_of_all_hosts() -> None:
    alone = build_affinity_map(host(gpus=gpus("NVIDIA H200", 1, 140)))
    assert alone.devices[0].kind == "compute"  # 206 FLOP/byte, against the paper's pair
    both = build_affinity_map([host("a", gpus("NVIDIA H200", 1, 140)), host("b", gpus("NVIDIA H100 80GB HBM3", 2))])
    kinds = {pool.hardware_class: pool.kind for pool in both.pools}
    assert kinds == {"H200": "bandwidth", "H100": "compute", "CPU": None}
    assert both.reference_ridge == pytest.approx(246.76, abs=0.01)  # sqrt(989.5/4.8 * 989.5/3.35)
    assert [pool.devices for pool in both.pools] == [("a/gpu0",), ("b/gpu0", "b/gpu1"), ("a/cpu", "b/cpu")]


def test_cpus_beside_gpus_on_another_host_leave_generation_to_them() -> None:
    affinity = build_affinity_map([host("cpu-only"), host("gpu", gpus("NVIDIA H20", 1, 95))])
    cpus = [device for device in affinity.devices if device.hardware_class == "CPU"]
    assert [device.roles for device in cpus] == [("environment", "reward")] * 2
    assert [device.id for device in affinity.gpus] == ["gpu0"]
    assert affinity.cores == 32


def test_two_hosts_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="different names"):
        build_affinity_map([host("a"), host("a")])


def test_the_profiles_memory_overrides_the_table_but_not_what_is_there() -> None:
    profile = ResourceProfile(gpus={"h20": GpuProfile(mem_per_gpu=48), "H800": GpuProfile(mem_per_gpu=80)})
    mixed = gpus("NVIDIA H20", 1, 95.6) + gpus("NVIDIA H800", 1, 79.6, start=1)
    affinity = build_affinity_map(host(gpus=mixed), profile)
    assert [device.memory_bytes for device in affinity.gpus] == [48 * GIB, int(79.6 * GIB)]
    assert codes(affinity) == []  # 80 is the H800's nominal size
    greedy = build_affinity_map(host(gpus=mixed), ResourceProfile(gpus={"H20": GpuProfile(mem_per_gpu=192)}))
    assert greedy.gpus[0].memory_bytes == int(95.6 * GIB)
    assert codes(greedy) == ["smaller_than_profile"]


def test_gpus_beyond_the_profiles_count_are_left_out_and_missing_ones_told() -> None:
    profile = ResourceProfile(gpus={"H800": GpuProfile(count=2), "H20": GpuProfile(count=64)})
    affinity = build_affinity_map(host(gpus=gpus("NVIDIA H800", 3)), profile)
    assert [device.id for device in affinity.gpus] == ["gpu0", "gpu1"]
    assert affinity.devices[2].roles == ()
    assert sorted(codes(affinity)) == ["beyond_profile", "fewer_than_profile"]
    pools = {pool.hardware_class: pool for pool in affinity.pools}
    assert (pools["H800"].declared, pools["H800"].devices) == (2, ("a/gpu0", "a/gpu1"))
    assert (pools["H20"].declared, pools["H20"].devices, pools["H20"].kind) == (64, (), "bandwidth")


def test_a_job_may_be_told_to_use_no_gpu() -> None:
    affinity = build_affinity_map(
        host(gpus=gpus("NVIDIA H800", 1)), ResourceProfile(gpus={"H800": GpuProfile(count=0)})
    )
    assert affinity.gpus == ()
    assert "train" in affinity.devices[-1].roles


@pytest.mark.parametrize(
    ("numa", "expected"),
    [("balanced", ["0-2", "8-9"]), ("compact", ["0-4", ""]), ("off", ["0-4"])],
)
def test_declared_cores_are_taken_by_numa_policy(numa: str, expected: list[str]) -> None:
    profile = ResourceProfile(cpu=msgspec.convert({"cores": 5, "numa": numa}, CpuProfile))
    (share,) = build_affinity_map(host(), profile).hosts
    assert share.cores == 5
    assert [node.cpus for node in share.numa] == expected


def test_declared_cores_are_dealt_over_hosts_as_far_as_each_has() -> None:
    small, large = host("small", nodes=1, cpus_per_node=4), host("large")
    affinity = build_affinity_map([small, large], ResourceProfile(cpu=CpuProfile(cores=12)))
    assert [share.cores for share in affinity.hosts] == [4, 8]
    affinity = build_affinity_map([small, large], ResourceProfile(cpu=CpuProfile(cores=128)))
    assert [share.cores for share in affinity.hosts] == [4, 16]
    assert codes(affinity) == ["fewer_than_profile"]


def test_a_quota_narrows_the_cores_but_not_the_cpus() -> None:
    limited = host()
    limited = msgspec.structs.replace(limited, cpu=msgspec.structs.replace(limited.cpu, quota=3.0, usable=3))
    (share,) = build_affinity_map(limited).hosts
    assert (share.cores, share.cpus) == (3, "0-15")


def test_a_gpu_whose_node_is_outside_the_mask_is_told_and_runs_on_what_there_is() -> None:
    limited = host(gpus=gpus("NVIDIA H800", 2))
    limited = msgspec.structs.replace(limited, cpu=msgspec.structs.replace(limited.cpu, allowed="0-3", usable=4))
    affinity = build_affinity_map(limited)
    assert [device.cpus for device in affinity.gpus] == ["0-3", "0-3"]
    assert [(finding.code, finding.subjects) for finding in affinity.findings] == [("far_cores", ("gpu1",))]


def test_the_same_finding_on_several_parts_is_one() -> None:
    one, two = Finding("lost", "error", ("gpu1",), "d"), Finding("lost", "error", ("gpu2",), "d")
    other = Finding("denied", "warning", ("gpu1",), "d")
    assert coalesce([one, other, two]) == (Finding("lost", "error", ("gpu1", "gpu2"), "d"), other)


def test_too_many_findings_end_in_one_that_counts_the_rest() -> None:
    many = coalesce([Finding("failed", "warning", (), str(number)) for number in range(100)], limit=10)
    assert len(many) == 10
    assert (many[-1].code, many[-1].detail) == ("findings_omitted", "91 more findings were left out")


def crowded(name: str) -> Hardware:
    """16 GPUs that all reach each other, 64 NICs, 8 NUMA nodes, and 500 findings as long as they get."""
    cards = tuple(
        Gpu(
            index=index,
            name="NVIDIA H800",
            uuid="GPU-" + "0" * 36,
            memory_bytes=80 * GIB,
            pci_bus_id="0000:00:00.0",
            numa_node=index // 2,
            cpus=",".join(str(cpu) for cpu in range(0, 128, 2)),  # a list that does not shrink to ranges
            nvlink_peers=tuple(peer for peer in range(16) if peer != index),
        )
        for index in range(16)
    )
    nics = tuple(
        Nic(name=f"enp{number}s0f0np0", up=True, virtual=False, mtu=9000, speed_mbps=400000, numa_node=number // 8)
        for number in range(64)
    )
    findings = tuple(Finding("failed", "warning", (f"gpu{number}",), f"{number}" + "x" * 300) for number in range(500))
    base = host(name, cards, nodes=8, cpus_per_node=16)
    return msgspec.structs.replace(base, nics=nics, findings=findings)


def test_a_map_survives_encoding_and_a_crowded_host_fits_the_store() -> None:
    affinity = build_affinity_map(crowded("a"))
    encoded = encode(affinity)
    assert len(encoded) <= 65536
    assert decode(encoded) == affinity


def test_a_map_too_large_for_the_store_is_refused_and_its_hosts_fit() -> None:
    affinity = build_affinity_map([crowded(f"node-{number}") for number in range(8)])
    with pytest.raises(MapTooLarge, match="8 hosts: expected at most 65536 bytes"):
        encode(affinity)
    part = decode(encode(affinity.of_host("node-3")))
    assert {device.host for device in part.devices} == {"node-3"}
    assert len(part.devices) == 17
    assert [share.host for share in part.hosts] == ["node-3"]
    assert part.pools[0].devices == tuple(f"node-3/gpu{index}" for index in range(16))


def test_one_hosts_part_tells_its_own_findings_and_the_pools() -> None:
    profile = ResourceProfile(gpus={"H20": GpuProfile(count=1)})
    affinity = build_affinity_map([host("a", gpus("NVIDIA X9", 1)), host("b", gpus("NVIDIA X9", 1))], profile)
    assert [finding.subjects for finding in affinity.findings] == [("a/gpu0", "b/gpu0"), ("H20",)]
    assert [finding.subjects for finding in affinity.of_host("b").findings] == [("b/gpu0",), ("H20",)]


def test_the_briefs_profile_is_read_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: job\n"
        "resource_profile:\n"
        "  gpus:\n"
        "    H800: {count: 32, mem_per_gpu: 80}\n"
        "    H20: {count: 64, mem_per_gpu: 48}\n"
        "  cpu: {cores: 128, numa: balanced}\n"
    )
    assert load_profile(path) == ResourceProfile(
        gpus={"H800": GpuProfile(count=32, mem_per_gpu=80), "H20": GpuProfile(count=64, mem_per_gpu=48)},
        cpu=CpuProfile(cores=128, numa="balanced"),
    )


@pytest.mark.parametrize(
    ("text", "path_named"),
    [
        ("gpus: {H20: {cuont: 1}}", "$.gpus[...]"),
        ("gpus: {H20: {count: -1}}", "$.gpus[...].count"),
        ("cpu: {numa: sideways}", "$.cpu.numa"),
        ("cpu: {cores: many}", "$.cpu.cores"),
        ("gpus: [", "not valid YAML"),
    ],
)
def test_a_wrong_profile_is_one_line_that_names_the_place(tmp_path: Path, text: str, path_named: str) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError) as caught:
        load_profile(path)
    assert path_named in str(caught.value)
    assert "\n" not in str(caught.value)
