"""Pools over several hosts, and who gets what of them: small clusters by hand."""

from __future__ import annotations

import msgspec
import pytest

from actors.settings import RolloutSettings, TrainSettings
from bus.message import NodeAddress
from coordinator.job import Job
from coordinator.messages import Join
from coordinator.resources.binding import Binding, CannotBind, Need, bind, fallbacks
from coordinator.resources.pools import pools_of
from coordinator.resources.resolve import resolve
from hwprobe import (
    AffinityMap,
    Cpu,
    CpuProfile,
    Gpu,
    GpuProfile,
    Hardware,
    Memory,
    NumaNode,
    ResourceProfile,
    build_affinity_map,
    encode,
    merge,
)

GIB = 1 << 30


def host(name: str, gpus: str = "", count: int = 0, gib: int = 80, cores: int = 8) -> Hardware:
    cpus = f"0-{cores - 1}"
    return Hardware(
        host=name,
        cpu=Cpu(model="c", online=cpus, allowed=cpus, physical_cores=cores, sockets=1, usable=cores),
        memory=Memory(total_bytes=64 * GIB, usable_bytes=64 * GIB, host_available_bytes=64 * GIB),
        numa=(NumaNode(0, cpus, 64 * GIB),),
        gpus=tuple(Gpu(index=index, name=f"NVIDIA {gpus}", memory_bytes=gib * GIB) for index in range(count)),
    )


CLUSTER = (host("a", "H800", 2), host("b", "H20", 2, 96), host("c"))


def cluster(*hosts: Hardware) -> AffinityMap:
    return build_affinity_map(list(hosts))


# ---- over all hosts -------------------------------------------------------------------------------------------------


def test_maps_of_single_hosts_join_to_the_map_of_all() -> None:
    """Alone, H20 is compared with the paper's pair; beside H800 with those: the whole decides."""
    whole = build_affinity_map(list(CLUSTER))
    assert merge([build_affinity_map(one) for one in CLUSTER]) == whole
    assert {device.kind for device in whole.gpus if device.hardware_class == "H20"} == {"bandwidth"}


def test_a_profile_holds_for_the_whole_pool() -> None:
    profile = ResourceProfile(gpus={"H20": GpuProfile(count=1, mem_per_gpu=48)}, cpu=CpuProfile(cores=9))
    merged = merge([build_affinity_map(one) for one in (*CLUSTER, host("d", "H20", 2, 96))], profile)
    usable = [device for device in merged.gpus if device.hardware_class == "H20"]
    assert [(device.host, device.memory_bytes) for device in usable] == [("b", 48 * GIB)]
    assert [share.cores for share in merged.hosts] == [3, 2, 2, 2]  # 9, dealt out evenly


def test_a_host_counts_once_and_its_pools_are_shown() -> None:
    def join(node: str, one: Hardware) -> Join:
        return Join(NodeAddress(node, f"tcp://{node}:1", "", 1), ["env"], 1, encode(build_affinity_map(one)))

    joins = [join("n1", CLUSTER[0]), join("n2", CLUSTER[0]), join("n3", CLUSTER[1])]
    shown = pools_of(joins, ResourceProfile(gpus={"H20": GpuProfile(count=8)}))
    facts = [(pool.hardware_class, pool.kind, pool.devices, pool.declared, pool.hosts) for pool in shown.pools]
    assert facts == [
        ("H800", "compute", 2, None, ["a"]),
        ("H20", "bandwidth", 2, 8, ["b"]),
        ("CPU", "", 2, None, ["a", "b"]),
    ]
    assert shown.warnings == ["the profile declares 8, found 2"]


# ---- who gets what --------------------------------------------------------------------------------------------------


def test_each_role_gets_its_preferred_pool_while_there_is_some() -> None:
    found = bind(
        [Need(role="train", count=1), Need(role="decode", count=2), Need(role="environment", count=3)],
        cluster(*CLUSTER),
    )
    assert [(one.role, one.devices, one.fell_back) for one in found] == [
        ("train", ("a/gpu0",), False),
        ("decode", ("b/gpu0", "b/gpu1"), False),
        ("environment", ("a/cpu", "b/cpu", "c/cpu"), False),
    ]


def test_what_the_preferred_pool_lacks_comes_from_a_compatible_one_with_the_reason() -> None:
    found = bind([Need(role="decode", count=3)], cluster(*CLUSTER))
    assert [(one.hardware_class, one.devices) for one in found] == [
        ("H20", ("b/gpu0", "b/gpu1")),
        ("H800", ("a/gpu0",)),
    ]
    assert fallbacks(found) == ["decode: 1 x H800 instead of H20: 2 of 2 in use"]


def test_a_declared_class_comes_first_and_one_that_is_not_there_is_named() -> None:
    (declared,) = bind([Need(role="decode", count=1, declared="H800")], cluster(*CLUSTER))
    assert declared == Binding(role="decode", hardware_class="H800", devices=("a/gpu0",), preferred="H800")
    (missing,) = bind([Need(role="decode", count=1, declared="B200")], cluster(*CLUSTER))
    assert missing.describe() == "decode: 1 x H20 instead of B200: there is no B200"


def test_a_device_that_is_too_small_is_passed_over() -> None:
    (found,) = bind([Need(role="train", count=1, memory_bytes=90 * GIB)], cluster(*CLUSTER))
    assert found.describe() == "train: 1 x H20 instead of H800: 90.0 GiB are needed, a device has 80.0"


def test_devices_in_use_are_not_given_twice() -> None:
    (found,) = bind([Need(role="train", count=1)], cluster(*CLUSTER), taken=["a/gpu0"])
    assert found.devices == ("a/gpu1",)
    lacking = r"train: expected 5 devices, 1 are missing \(H800: 2 of 2 in use, H20: 2 of 2 in use\)"
    with pytest.raises(CannotBind, match=lacking):
        bind([Need(role="train", count=5)], cluster(*CLUSTER))
    with pytest.raises(CannotBind, match="decode: no device of this cluster can do it"):
        bind([Need(role="decode", count=1)], cluster(CLUSTER[0]).of_host("nobody"))


def test_every_role_shares_the_processors_where_there_is_nothing_else() -> None:
    found = bind([Need(role="train", count=1), Need(role="decode", count=2)], cluster(host("c")))
    assert [one.devices for one in found] == [("c/cpu",), ("c/cpu", "c/cpu")]


# ---- a job on it ----------------------------------------------------------------------------------------------------


def job(affinity: dict[str, str], engines: int | None = None) -> Job:
    rollout = RolloutSettings(engine="torch", affinity=affinity)
    if engines is not None:
        rollout = msgspec.structs.replace(rollout, engines=engines)
    return Job(rollout=rollout, train=TrainSettings(groups_per_step=2, group_size=4))


def test_a_job_takes_training_from_compute_and_all_the_rest_for_engines() -> None:
    mixed = msgspec.structs.replace(host("a", "H800", 2), gpus=(*host("a", "H20", 2, 96).gpus, *_more(2)))
    _, placement = resolve(job({}), cluster(mixed))
    assert [(place.name, place.device, place.hardware_class) for place in placement.places[:4]] == [
        ("engine-0", "gpu0", "H20"),
        ("engine-1", "gpu1", "H20"),
        ("engine-2", "gpu3", "H800"),
        ("trainer-0", "gpu2", "H800"),
    ]
    assert placement.notes == []


def test_a_role_on_a_host_of_its_own_gets_all_that_is_there() -> None:
    alone = cluster(host("a", "H800", 2))
    _, engines = resolve(job({}), alone, here=("proxy",))
    assert [(place.name, place.device, place.threads) for place in engines.places] == [
        ("engine-0", "gpu0", 4),
        ("engine-1", "gpu1", 4),
    ]
    _, trainer = resolve(job({}), alone, here=("trainer",))
    assert [(place.name, place.device, place.threads) for place in trainer.places] == [("trainer-0", "gpu0", 8)]
    resolved, nobody = resolve(job({}), cluster(host("a", "H800", 1)), here=())  # a coordinator alone
    assert (nobody.places, resolved.rollout.engines) == ([], 1)


def test_a_job_says_where_it_fell_back() -> None:
    _, placement = resolve(job({"frozenlake": "H20"}, engines=1), cluster(host("a", "H800", 2)))
    assert placement.notes == ["decode: 1 x H800 instead of H20: there is no H20"]
    assert placement.describe().endswith("decode: 1 x H800 instead of H20: there is no H20")


def _more(count: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(index=2 + index, name="NVIDIA H800", memory_bytes=80 * GIB) for index in range(count))
