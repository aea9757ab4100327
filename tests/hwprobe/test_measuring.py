"""Measured against claimed: rates from a scripted measurement, and a real one of this machine's CPUs."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import pytest

from hwprobe import Cpu, Gpu, Hardware, Memory, NumaNode, Rates, build_affinity_map
from hwprobe.measuring import NotMeasured, measure_all, measure_in_child

GIB = 1 << 30


def machine(*gpus: Gpu) -> Hardware:
    return Hardware(
        host="a",
        cpu=Cpu(model="cpu", online="0-3", allowed="0-3", physical_cores=4, sockets=1, usable=4, isa="avx2"),
        memory=Memory(total_bytes=64 * GIB, usable_bytes=64 * GIB, host_available_bytes=60 * GIB),
        numa=(NumaNode(0, "0-3", 64 * GIB),),
        gpus=gpus,
    )


class Scripted:
    """Measures nothing: answers by the name of the device that its environment shows."""

    def __init__(self, **answers: Rates | str) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str, str]] = []

    def __call__(self, device: str, dtype: str, environ: Mapping[str, str]) -> Rates:
        name = environ["CUDA_VISIBLE_DEVICES"] if device == "cuda" else "cpu"
        self.asked.append((device, dtype, name))
        answer = self.answers[name.replace("-", "_")]
        if isinstance(answer, str):
            raise NotMeasured(answer)
        return answer


def bf16(tflops: float, gb_s: float) -> Rates:
    return Rates(flops=tflops * 1e12, bandwidth=gb_s * 1e9, dtype="bf16")


CPU_RATES = Rates(flops=1e11, bandwidth=2e10, dtype="fp32")


def test_a_device_far_below_its_data_sheet_is_told_with_what_holds_it_back() -> None:
    hardware = machine(
        Gpu(index=0, name="NVIDIA H800", uuid="GPU-a"),
        Gpu(index=1, name="NVIDIA H800", uuid="GPU-b", throttled_by=("hardware_thermal",)),
    )
    measure = Scripted(GPU_a=bf16(650, 2900), GPU_b=bf16(310, 1800), cpu=CPU_RATES)
    measured = measure_all(hardware, measure=measure)
    (finding,) = measured.findings
    assert (finding.code, finding.severity, finding.subjects) == ("slower_than_claimed", "warning", ("gpu1",))
    # 310 < 0.5 x 989.5 TFLOP/s; 1,800 < 0.6 x 3,350 GB/s.
    assert finding.detail == (
        "measured 310 of 990 TFLOP/s and 1800 of 3350 GB/s; its clocks are held down: hardware_thermal"
    )
    affinity = build_affinity_map(measured)
    assert affinity.devices[1].peak_bf16_flops == 989.5e12  # what it should do; the finding says what it does
    assert measure.asked == [("cuda", "bf16", "GPU-a"), ("cuda", "bf16", "GPU-b"), ("cpu", "fp32", "cpu")]


def test_an_unknown_gpu_has_the_figures_that_were_measured_and_a_kind() -> None:
    hardware = machine(Gpu(index=0, name="NVIDIA X9", uuid="GPU-a"), Gpu(index=1, name="NVIDIA H20", uuid="GPU-b"))
    measure = Scripted(GPU_a=bf16(300, 2000))
    affinity = build_affinity_map(measure_all(hardware, only_unknown=True, measure=measure))
    assert measure.asked == [("cuda", "bf16", "GPU-a")]
    first, second = affinity.gpus
    assert (first.ridge, first.kind, second.kind) == (150.0, "compute", "bandwidth")
    assert affinity.findings == ()


def test_the_cpus_measured_figures_replace_their_estimate_in_proportion_to_the_cores_of_a_profile() -> None:
    measured = measure_all(machine(), measure=Scripted(cpu=CPU_RATES))
    (cpu,) = build_affinity_map(measured).devices
    assert (cpu.peak_bf16_flops, cpu.bandwidth) == (1e11, 2e10)


def test_a_measurement_that_fails_is_a_finding_and_leaves_the_figures() -> None:
    hardware = machine(Gpu(index=0, name="NVIDIA H20", uuid="GPU-a"))
    measured = measure_all(hardware, measure=Scripted(GPU_a="CUDA out of memory", cpu=CPU_RATES))
    assert [(one.code, one.subjects, one.detail) for one in measured.findings] == [
        ("not_measured", ("gpu0",), "CUDA out of memory")
    ]
    assert build_affinity_map(measured).devices[0].peak_bf16_flops == 148e12


def test_a_measurement_that_does_not_end_is_ended() -> None:
    with pytest.raises(NotMeasured, match=r"did not end within 0\.01 s"):
        measure_in_child("cpu", "fp32", {}, timeout_s=0.01)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: nothing to measure with")
def test_this_machines_cpus_are_measured_in_a_child() -> None:
    rates = measure_in_child("cpu", "fp32", {"OMP_NUM_THREADS": "1"})
    # Any CPU of this century: above 10 MFLOP/s and 10 MB/s, below a thousand times the fastest core.
    assert 1e7 < rates.flops < 1e16
    assert 1e7 < rates.bandwidth < 1e13


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: nothing to measure with")
def test_a_child_without_a_gpu_says_so() -> None:
    with pytest.raises(NotMeasured, match=r"CUDA|NVIDIA|cuda"):
        measure_in_child("cuda", "bf16", {"CUDA_VISIBLE_DEVICES": ""})
