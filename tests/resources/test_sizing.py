"""A job sizes itself by the map of its host: what it gets where, from two cores to eight GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from coordinator.job import JobError, convert
from coordinator.resources.resolve import Placement, check_trainable, resolve
from hwprobe import Cpu, Gpu, GpuSlice, Hardware, Memory, NumaNode, build_affinity_map

GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[2]


def machine(cpus: int, usable: int, gpus: tuple[Gpu, ...] = ()) -> Hardware:
    every = f"0-{cpus - 1}"
    return Hardware(
        host="a",
        cpu=Cpu(model="cpu", online=every, allowed=every, physical_cores=cpus, sockets=1, usable=usable),
        memory=Memory(total_bytes=64 * GIB, usable_bytes=64 * GIB, host_available_bytes=60 * GIB),
        numa=(NumaNode(0, every, 64 * GIB),),
        gpus=gpus,
    )


def cards(name: str, count: int, start: int = 0) -> tuple[Gpu, ...]:
    return tuple(Gpu(index=start + number, name=name, memory_bytes=80 * GIB, numa_node=0) for number in range(count))


def placed(hardware: Hardware, *overrides: str) -> Placement:
    job = convert({}, "job.yaml", ["rollout.engine=torch", *overrides])
    return resolve(job, build_affinity_map(hardware))[1]


# An engine and a trainer share the cores evenly; one worker process for user code for every eight cores.
@pytest.mark.parametrize(
    ("cpus", "usable", "threads", "workers"),
    [
        (2, 2, 1, 1),  # a small virtual machine
        (8, 1, 1, 1),  # a container with a quota of one and a half CPUs
        (16, 16, 8, 2),
        (64, 64, 32, 8),
    ],
)
def test_a_machine_without_a_gpu_is_shared_by_an_engine_and_a_trainer(
    cpus: int, usable: int, threads: int, workers: int
) -> None:
    placement = placed(machine(cpus, usable))
    assert [(place.name, place.device, place.threads) for place in placement.of("engine")] == [
        ("engine-0", "cpu", threads)
    ]
    assert [(place.name, place.threads) for place in placement.of("trainer")] == [("trainer-0", threads)]
    assert len(placement.of("env-worker")) == workers
    assert {place.cuda for place in placement.places} == {""}


def test_eight_gpus_are_one_for_training_and_seven_engines_each_seeing_its_own() -> None:
    placement = placed(machine(64, 64, cards("NVIDIA H800", 4) + cards("NVIDIA H20", 4, start=4)))
    (trainer,) = placement.of("trainer")
    assert (trainer.hardware_class, trainer.threads) == ("H800", 8)  # 64 cores by eight processes
    engines = placement.of("engine")
    assert len(engines) == 7
    assert {place.cuda for place in engines} == {str(index) for index in range(8)} - {trainer.cuda}
    assert engines[0].hardware_class == "H20"  # bandwidth for decoding comes first


def test_a_process_on_a_slice_sees_that_slice_alone() -> None:
    slices = tuple(
        GpuSlice(index=place, name=f"NVIDIA H800 MIG {size}g.40gb", uuid=f"MIG-{place}", memory_bytes=40 * GIB, sms=60)
        for place, size in enumerate((3, 3))
    )
    gpu = Gpu(index=0, name="NVIDIA H800", memory_bytes=80 * GIB, sms=132, numa_node=0, mig=True, slices=slices)
    placement = placed(machine(8, 8, (gpu,)))
    seen = [(place.role, place.device, place.cuda) for place in placement.places if place.cuda]
    assert sorted(seen) in (
        [("engine", "gpu0.0", "MIG-0"), ("trainer", "gpu0.1", "MIG-1")],
        [("engine", "gpu0.1", "MIG-1"), ("trainer", "gpu0.0", "MIG-0")],
    )


def test_a_training_command_that_may_use_one_core_sizes_itself_for_that() -> None:
    """The real probe of this machine, narrowed by the affinity mask as a container's cpuset would."""
    mask = os.sched_getaffinity(0)
    command = [sys.executable, "-m", "coordinator.commands.train", "--dry-run", str(ROOT / "examples/frozenlake.yaml")]
    environ = dict(os.environ) | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    try:
        os.sched_setaffinity(0, {min(mask)})  # inherited by the child
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    finally:
        os.sched_setaffinity(0, mask)
    assert done.returncode == 0, done.stderr
    rows = [
        line.split() for line in done.stdout.splitlines() if line.startswith(("engine-", "trainer-", "env-worker-"))
    ]
    assert [(row[0], row[2], row[-1]) for row in rows] == [
        ("engine-0", "cpu", "1"),
        ("trainer-0", "cpu", "1"),
        ("env-worker-0", "cpu", "1"),
    ]


def paired(gpus: tuple[Gpu, ...], *pairs: tuple[int, int]) -> tuple[Gpu, ...]:
    """NVLink joins those of a pair, and nobody else."""
    peers = {one: (other,) for pair in pairs for one, other in (pair, pair[::-1])}
    return tuple(msgspec.structs.replace(gpu, nvlink_peers=peers.get(gpu.index, ())) for gpu in gpus)


def test_an_engine_on_two_gpus_gets_two_of_one_class_that_nvlink_joins() -> None:
    gpus = paired(cards("NVIDIA H20", 5), (0, 3), (1, 4))
    placement = placed(machine(64, 64, gpus), "rollout.engine=vllm", "rollout.tensor_parallel=2")
    assert [place.cuda for place in placement.of("trainer")] == ["0"]
    assert {place.cuda for place in placement.of("engine")} == {"1,4", "2,3"}  # 3 has lost its partner to the trainer


def test_gpus_that_make_no_whole_engine_stay_idle_and_that_is_said() -> None:
    placement = placed(
        machine(64, 64, cards("NVIDIA H800", 2) + cards("NVIDIA H20", 3, start=2)),
        "rollout.engine=vllm",
        "rollout.tensor_parallel=2",
    )
    assert [place.cuda for place in placement.of("engine")] == ["2,3"]  # an H800 trains, the other one is alone
    assert placement.notes[-1] == "2 GPUs stay idle: an engine takes 2 of one class"


def test_an_engine_on_several_devices_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(JobError, match=r"rollout\.tensor_parallel: the torch engine runs on one device"):
        placed(machine(8, 8), "rollout.tensor_parallel=2")
    with pytest.raises(JobError, match=r"rollout\.tensor_parallel: 3 does not divide .* heads \(2\)"):
        placed(machine(8, 8), "rollout.engine=vllm", "rollout.tensor_parallel=3")
    with pytest.raises(JobError, match="1 ranks and an engine need 3 GPUs, found 2"):
        placed(machine(8, 8, cards("NVIDIA H20", 2)), "rollout.engine=vllm", "rollout.tensor_parallel=2")


def test_an_engine_for_each_server_needs_no_device_of_this_host() -> None:
    servers = 'rollout.servers=["http://a:30000", "http://b:30000"]'
    placement = placed(machine(8, 8, cards("NVIDIA H20", 1)), "rollout.engine=sglang", servers)
    found = [(place.name, place.device, place.cuda) for place in placement.of("engine")]
    assert found == [("engine-0", "cpu", ""), ("engine-1", "cpu", "")]
    assert [place.hardware_class for place in placement.of("trainer")] == ["H20"]


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["rollout.engine=sglang"], "expected the URLs of its servers"),
        (["rollout.engine=torch", 'rollout.servers=["http://a"]'], "expected none, which only openai and sglang"),
        (
            ["rollout.engine=openai", 'rollout.servers=["http://a/v1"]', "rollout.engines=2"],
            "expected one for each of 1 servers, found 2",
        ),
    ],
)
def test_servers_that_do_not_fit_the_engine_are_refused(overrides: list[str], why: str) -> None:
    with pytest.raises(JobError, match=why):
        placed(machine(8, 8), *overrides)


def test_nothing_is_trained_with_a_server_that_keeps_its_weights() -> None:
    job = convert({}, "job.yaml", ["rollout.engine=openai", 'rollout.servers=["http://a/v1"]'])
    with pytest.raises(JobError, match="keep the weights that they were started with"):
        check_trainable(job)
