"""Conditions that come and go: memory from synthetic files, GPUs from the fake library, and the map under them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hwprobe import Finding, Gpu, build_affinity_map
from hwprobe.pressure import MemoryPressure
from hwprobe.watching import Watch
from tests.hwprobe.conftest import ROOT
from tests.hwprobe.test_affinity import host
from tests.hwprobe.trees import write

GIB = 1 << 30
PSI = "some avg10={} avg60=1.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0"


def codes(memory: MemoryPressure) -> list[str]:
    return [finding.code for finding in memory.look()]


def test_waiting_for_memory_begins_at_ten_per_cent_and_ends_below_five(tmp_path: Path) -> None:
    memory = MemoryPressure(tmp_path, tmp_path / "absent")
    assert codes(memory) == []  # a kernel without such figures
    seen = []
    for share in ("9.99", "10.00", "7.50", "5.00", "4.99", "9.00"):
        write(tmp_path, {"pressure/memory": PSI.format(share)})
        seen.append(codes(memory))
    assert seen == [[], ["memory_pressure"], ["memory_pressure"], ["memory_pressure"], [], []]


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_group_near_its_limit_is_told_without_the_cache_that_would_go_first(tmp_path: Path, version: str) -> None:
    if version == "v2":
        group, limit, usage = tmp_path / "cgroup/pod", "memory.max", "memory.current"
        write(tmp_path, {"cgroup/cgroup.controllers": "memory", "proc/self/cgroup": "0::/pod"})
    else:
        group, limit, usage = tmp_path / "cgroup/memory/pod", "memory.limit_in_bytes", "memory.usage_in_bytes"
        write(tmp_path, {"proc/self/cgroup": "4:memory:/pod"})
    write(group, {limit: str(10 * GIB), usage: str(10 * GIB), "memory.stat": f"anon 1\ninactive_file {2 * GIB}"})
    memory = MemoryPressure(tmp_path / "proc", tmp_path / "cgroup")
    assert codes(memory) == []  # 8 of 10 GiB
    write(group, {"memory.stat": f"anon 1\ninactive_file {GIB // 2}"})
    assert codes(memory) == ["memory_full"]  # 9.5
    write(group, {"memory.stat": f"anon 1\ninactive_file {GIB // 4 * 3}"})
    assert codes(memory) == ["memory_full"]  # 9.25: not yet below 9
    write(group, {"memory.stat": f"anon 1\ninactive_file {3 * GIB}"})
    assert codes(memory) == []


CHILD = """
import os, sys, time
import msgspec
from pathlib import Path
from hwprobe.pressure import MemoryPressure
from hwprobe.watching import Watch

watch = Watch(MemoryPressure(Path("/absent"), Path("/absent")), period_s=0.01, hung_s=0.5)
told = []

def until_told():
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        changes = watch.look()
        if changes:
            told.append(changes)
            return
        time.sleep(0.02)

for variables in msgspec.json.decode(sys.argv[1]):
    os.environ |= variables
    until_told()
watch.stop()
sys.stdout.buffer.write(msgspec.json.encode([[one.begun, one.ended, one.gpus_seen] for one in told]))
"""


Told = tuple[list[Finding], list[Finding], bool]


def told(fake_nvml: Path, *steps: dict[str, str]) -> list[Told]:
    """What began and ended after each change of the fake library's variables, two GPUs watched, and whether they were
    looked at."""
    environ = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    environ |= {
        "LD_LIBRARY_PATH": str(fake_nvml),
        "PYTHONPATH": str(ROOT),
        "FAKE_NVML_GPUS": "NVIDIA H800|1;NVIDIA H800|1",
    }
    environ |= {"FAKE_NVML_VALUES": "", "FAKE_NVML_FAULTS": ""}
    command = [sys.executable, "-c", CHILD, msgspec.json.encode(steps).decode()]
    done = subprocess.run(command, env=environ, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return msgspec.json.decode(done.stdout, type=list[Told])


def test_a_gpu_that_is_slowed_then_lost_then_back_is_told_at_each_turn(fake_nvml: Path) -> None:
    reasons = "nvmlDeviceGetCurrentClocksThrottleReasons"
    answers = told(
        fake_nvml,
        {"FAKE_NVML_VALUES": f"1:{reasons}:0x40;1:nvmlDeviceGetClockInfo.1:990"},
        {"FAKE_NVML_FAULTS": f"1:{reasons}:15"},
        {"FAKE_NVML_VALUES": "", "FAKE_NVML_FAULTS": ""},
    )
    said = [
        ([(one.code, one.subjects) for one in begun], [(one.code, one.subjects) for one in ended])
        for begun, ended, _ in answers
    ]
    assert said == [
        ([("throttled", ("gpu1",))], []),
        ([("lost", ("gpu1",))], [("throttled", ("gpu1",))]),
        ([], [("lost", ("gpu1",))]),
    ]
    assert answers[0][0][0].detail == "its clocks are held down: hardware_thermal, at 990 MHz"


def test_a_driver_that_hangs_as_it_starts_is_told_and_says_nothing_of_gpus(fake_nvml: Path) -> None:
    ((begun, ended, gpus_seen),) = told(fake_nvml, {"FAKE_NVML_FAULTS": "-:nvmlInitWithFlags:hang"})
    assert [(one.code, one.subjects, one.detail) for one in begun] == [
        ("timed_out", ("nvml",), "NVML does not return from nvmlInit")
    ]
    assert (ended, gpus_seen) == ([], False)


def test_until_the_gpus_were_looked_at_what_the_probe_found_of_them_stands() -> None:
    slow = Finding("throttled", "warning", ("gpu0",), "its clocks are held down")
    full = Finding("memory_full", "warning", ("memory",), "95 of 100 GiB")
    found = build_affinity_map(host("a", gpus=(Gpu(index=0, name="NVIDIA H20", memory_bytes=GIB, numa_node=0),)))
    found = msgspec.structs.replace(found, findings=(slow, full))
    assert found.under((), gpus_seen=False).findings == (slow,)
    assert found.under(()).findings == ()


def test_a_driver_that_hangs_holds_up_nobody_and_is_told(fake_nvml: Path) -> None:
    ((begun, ended, _),) = told(fake_nvml, {"FAKE_NVML_FAULTS": "0:nvmlDeviceGetClockInfo:hang"})
    assert [(one.code, one.subjects) for one in begun] == [("timed_out", ("gpu0",))]
    assert "nvmlDeviceGetClockInfo" in begun[0].detail
    assert ended == []


def test_a_map_under_a_lost_gpu_uses_the_others_until_it_is_back() -> None:
    cards = tuple(Gpu(index=index, name="NVIDIA H20", memory_bytes=90 * GIB, numa_node=0) for index in range(2))
    affinity = build_affinity_map(host(gpus=cards))
    lost = Finding("lost", "error", ("gpu1",), "NVML says: GPU is lost")
    now = affinity.under([lost])
    assert [device.id for device in now.gpus] == ["gpu0"]
    assert (now.pools[0].devices, now.pools[0].memory_bytes) == (("a/gpu0",), 90 * GIB)
    assert now.findings == (lost,)
    warm = Finding("throttled", "warning", ("gpu0",), "its clocks are held down: thermal")
    assert now.under([warm]).findings == (warm,)  # it is not lost any more
    assert affinity.under([]) == affinity


def test_a_gpu_that_never_answered_stays_told() -> None:
    missing = Finding("lost", "error", ("gpu7",), "NVML says: GPU is lost")
    affinity = build_affinity_map(msgspec.structs.replace(host(), findings=(missing,)))
    assert affinity.under([]).findings == (missing,)


def test_where_there_is_no_gpu_the_watch_is_of_memory_alone(tmp_path: Path) -> None:
    watch = Watch(MemoryPressure(tmp_path, tmp_path / "absent"), period_s=0.01)
    write(tmp_path, {"pressure/memory": PSI.format("50.00")})
    assert [one.code for one in watch.look().begun] == ["memory_pressure"]
    assert not watch.look()
    write(tmp_path, {"pressure/memory": PSI.format("0.00")})
    assert [one.code for one in watch.look().ended] == ["memory_pressure"]
    watch.stop()
