"""GPUs sampled beside a process's work: the real bindings over the fake library, and sources that fail."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from hwprobe.nvml_usage import GpuUsage, NoGpus
from hwprobe.telemetry import KEPT, GpuFigures, GpuTelemetry
from hwprobe.vitals import GpuVitals, merged
from tests.hwprobe.conftest import ROOT

H800 = "NVIDIA H800|81559"
MIB = 1 << 20

CHILD = """
import sys, threading, time
import msgspec
from hwprobe.telemetry import GpuTelemetry

wanted = int(sys.argv[1])
telemetry = GpuTelemetry(0.01)
answers = []
deadline = time.monotonic() + 90
while len(answers) < wanted and time.monotonic() < deadline:
    time.sleep(0.05)
    figures = telemetry.take()
    if figures.state != "starting":
        answers.append(figures)
telemetry.stop()
alive = [thread.name for thread in threading.enumerate() if thread.name == "gpu-telemetry"]
sys.stdout.buffer.write(msgspec.json.encode([answers, alive]))
"""

Sampled = Callable[..., tuple[list[GpuFigures], list[str]]]


@pytest.fixture
def sampled(fake_nvml: Path) -> Sampled:
    """So many answers of a process that loads the fake library, and its threads at the end; keywords: FAKE_NVML_*."""

    def run(count: int, *, visible: str | None = None, **variables: str) -> tuple[list[GpuFigures], list[str]]:
        environ = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
        environ |= {f"FAKE_NVML_{key.upper()}": value for key, value in variables.items()}
        environ |= {"LD_LIBRARY_PATH": str(fake_nvml), "PYTHONPATH": str(ROOT)}
        if visible is not None:
            environ["CUDA_VISIBLE_DEVICES"] = visible
        command = [sys.executable, "-c", CHILD, str(count)]
        done = subprocess.run(command, env=environ, capture_output=True, timeout=180, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return msgspec.json.decode(done.stdout, type=tuple[list[GpuFigures], list[str]])

    return run


def test_the_busiest_of_the_visible_gpus_is_told_with_the_memory_of_all(sampled: Sampled) -> None:
    (figures,), alive = sampled(1, visible="2,1", gpus=";".join([H800] * 3), busy="99,20,85", used="1024")
    assert figures.state == "measuring"
    assert figures.utilisation == pytest.approx(0.85)
    assert (figures.memory_used, figures.memory_total) == (2 * 1024 * MIB, 2 * 81559 * MIB)
    assert figures.devices == ("GPU-00000002-0000-0000-0000-000000000000", "GPU-00000001-0000-0000-0000-000000000000")
    assert figures.errors == {}
    assert alive == []


def test_without_a_driver_nothing_runs(sampled: Sampled) -> None:
    (figures,), alive = sampled(1, faults="-:nvmlInitWithFlags:12")
    assert (figures.state, figures.samples, figures.utilisation, figures.devices) == ("absent", 0, None, ())
    assert alive == []


def test_without_a_visible_gpu_nothing_runs(sampled: Sampled) -> None:
    assert sampled(1, visible="", gpus=H800)[0][0].state == "absent"


def test_a_gpu_that_is_lost_meanwhile_is_counted_and_told_no_more(sampled: Sampled) -> None:
    answers, _ = sampled(3, gpus=H800, busy="95", healthy="1", faults="0:nvmlDeviceGetUtilizationRates:15")
    assert answers[0].utilisation == pytest.approx(0.95)
    assert (answers[-1].samples, answers[-1].utilisation) == (0, None)
    (error,) = answers[-1].errors
    assert error == "nvmlDeviceGetUtilizationRates: GPU is lost"
    assert answers[-1].errors[error] > answers[0].errors.get(error, 0)


def test_one_lost_gpu_of_two_does_not_hide_the_other(sampled: Sampled) -> None:
    (figures,), _ = sampled(1, gpus=f"{H800};{H800}", busy="95,40", faults="0:nvmlDeviceGetUtilizationRates:15")
    assert figures.utilisation == pytest.approx(0.4)
    assert len(figures.devices) == 1


def test_a_slice_without_such_a_figure_is_told_as_that(sampled: Sampled) -> None:
    (figures,), _ = sampled(1, gpus=H800, faults="0:nvmlDeviceGetUtilizationRates:3", used="7")
    assert figures.samples > 0
    assert (figures.utilisation, figures.memory_used) == (None, 7 * MIB)


SPLIT = {
    "gpus": f"{H800};{H800}",
    "mig": "1",
    "slices": "0:3g.40gb|40192|42|1000;0:1g.10gb|9728|14|512;1:7g.80gb|80000|132|7",
    "busy": "95,95",  # which nobody is told: see fake_nvml.c
}
SLICE = "MIG-00000000-0000-0000-0000-000000000001"


def test_a_process_that_sees_only_a_slice_is_told_its_memory_and_what_cannot_be_known(sampled: Sampled) -> None:
    answers, _ = sampled(3, visible=SLICE, **SPLIT, pcie="77")
    figures = answers[-1]
    assert (figures.state, figures.devices) == ("measuring", (SLICE,))
    assert (figures.memory_used, figures.memory_total) == (512 * MIB, 9728 * MIB)
    assert (figures.utilisation, figures.vitals, figures.errors) == (None, GpuVitals(), {})
    assert figures.missing == (
        "of a MIG slice NVML tells the memory, but no utilisation, power, temperature and traffic"
    )


def test_a_split_gpu_that_is_seen_as_a_whole_has_the_memory_of_its_slices_and_its_own_power(sampled: Sampled) -> None:
    """The driver denies the sum to who may not see all of the GPU (4 is no permission)."""
    answers, _ = sampled(3, visible="0", **SPLIT, faults="0:nvmlDeviceGetMemoryInfo.whole:4")
    figures = answers[-1]
    assert figures.devices == ("GPU-00000000-0000-0000-0000-000000000000",)
    assert (figures.memory_used, figures.memory_total) == (1512 * MIB, (40192 + 9728) * MIB)
    assert (figures.utilisation, figures.vitals.power_w, figures.errors) == (None, 140.0, {})
    assert figures.missing == "of a GPU that is split into MIG slices NVML tells no utilisation"


def test_a_slice_that_is_gone_is_counted_and_told_no_more(sampled: Sampled) -> None:
    answers, _ = sampled(2, visible=SLICE, **SPLIT, faults="0:nvmlDeviceGetMemoryInfo:2")
    assert [figures.samples for figures in answers] == [0, 0]
    assert list(answers[-1].errors) == ["nvmlDeviceGetMemoryInfo: Invalid Argument"]


def test_a_slice_that_the_driver_does_not_know_leaves_nothing_to_measure(sampled: Sampled) -> None:
    assert sampled(1, visible="MIG-0000ffff-0000-0000-0000-000000000000", **SPLIT)[0][0].state == "absent"


def test_a_call_that_hangs_holds_up_nobody(sampled: Sampled) -> None:
    answers, alive = sampled(2, gpus=H800, busy="95", healthy="1", faults="0:nvmlDeviceGetUtilizationRates:hang")
    assert [figures.samples for figures in answers] == [1, 0]
    assert alive == ["gpu-telemetry"]  # it ends with the process


class Scripted:
    """A source that answers at once."""

    def __init__(self) -> None:
        self.errors: Counter[str] = Counter()
        self.reads = threading.Semaphore(0)
        self.done = 0
        self.closed = False

    def read(self) -> list[GpuUsage]:
        if not self.reads.acquire(timeout=0.5):
            return []
        self.done += 1
        return [GpuUsage(0, "GPU-0", self.done / 1000, 1, 2)]

    def close(self) -> None:
        self.closed = True


def until(holds: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if holds():
            return
        time.sleep(0.001)
    raise TimeoutError("it has not happened within 10 s")


def test_memory_is_bounded_while_nobody_asks_and_each_sample_is_told_once() -> None:
    source = Scripted()
    telemetry = GpuTelemetry(0.0, lambda: source)
    source.reads.release(3 * KEPT)
    until(lambda: source.done == 3 * KEPT and source.reads._value == 0)
    until(lambda: len(telemetry._samples) == KEPT)
    until(lambda: telemetry._samples[-1][0].utilisation == 3 * KEPT / 1000)
    figures = telemetry.take()
    # The last KEPT of 3 KEPT numbers; their mean is that of the first and the last.
    assert figures.samples == KEPT
    assert figures.utilisation == pytest.approx((2 * KEPT + 1 + 3 * KEPT) / 2 / 1000)
    assert telemetry.take().samples == 0
    telemetry.stop()
    until(lambda: source.closed)


def test_until_the_driver_has_answered_it_is_not_known_whether_there_is_a_gpu() -> None:
    answer = threading.Event()

    def none() -> Scripted:
        answer.wait(10)
        raise NoGpus("no driver")

    telemetry = GpuTelemetry(0.01, none)
    assert telemetry.take().state == "starting"
    answer.set()
    until(lambda: telemetry.take().state == "absent")
    telemetry.stop()


def measured(found: tuple[list[GpuFigures], list[str]]) -> list[GpuFigures]:
    """Answers with samples in them: on a busy machine some have none."""
    return [figures for figures in found[0] if figures.samples]


def test_power_temperature_and_traffic_are_told_over_all_gpus(sampled: Sampled) -> None:
    """Two GPUs; fields 138 and 139 are NVLink's KiB, 197 and 198 PCIe's bytes (nvml.h)."""
    traffic = "138:4000000;139:2000000;197:1000000000;198:3000000000"
    answers = measured(sampled(10, gpus=f"{H800};{H800}", traffic=traffic, pcie="77"))
    vitals = answers[-1].vitals
    assert vitals.power_w == pytest.approx(2 * 140)
    assert vitals.temperature_c == 31  # of the hottest, not the sum
    assert vitals.memory_busy == 0.0
    assert vitals.nvlink_sent == pytest.approx(2 * 4_000_000 * 1024, rel=0.01)
    assert vitals.nvlink_received == pytest.approx(2 * 2_000_000 * 1024, rel=0.01)
    assert vitals.pcie_sent == pytest.approx(2e9, rel=0.01)
    assert vitals.pcie_received == pytest.approx(6e9, rel=0.01)
    assert answers[-1].errors == {}


def test_a_bus_without_counters_is_measured_by_the_driver(sampled: Sampled) -> None:
    answers = measured(sampled(5, gpus=H800, pcie="5000"))
    vitals = answers[-1].vitals
    assert (vitals.pcie_sent, vitals.pcie_received) == (5_000_000, 5_001_000)
    assert (vitals.nvlink_sent, vitals.nvlink_received) == (None, None)


def test_what_a_gpu_does_not_support_is_unknown_and_no_error(sampled: Sampled) -> None:
    faults = ";".join(
        f"0:{query}:3" for query in ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature", "nvmlDeviceGetFieldValues")
    )
    answers = measured(sampled(5, gpus=H800, busy="95", faults=faults))
    assert answers[-1].utilisation == pytest.approx(0.95)
    assert answers[-1].vitals == GpuVitals(memory_busy=0.0)
    assert answers[-1].errors == {}


def test_a_query_that_fails_is_counted_and_asked_again(sampled: Sampled) -> None:
    answers = measured(sampled(5, gpus=H800, faults="0:nvmlDeviceGetPowerUsage:999"))
    assert answers[-1].vitals.power_w is None
    (error,) = answers[-1].errors
    assert error.startswith("nvmlDeviceGetPowerUsage: ")
    assert answers[-1].errors[error] > answers[0].errors[error]


def test_over_time_each_gpus_figures_are_means_and_over_gpus_sums_or_the_largest() -> None:
    samples = [
        [(0, GpuVitals(power_w=100.0, temperature_c=50.0)), (1, GpuVitals(power_w=300.0, temperature_c=40.0))],
        [(0, GpuVitals(power_w=200.0, temperature_c=70.0)), (1, GpuVitals(temperature_c=40.0, memory_busy=0.5))],
    ]
    assert merged(samples) == GpuVitals(power_w=450.0, temperature_c=60.0, memory_busy=0.5)
