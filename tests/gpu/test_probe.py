"""The probe on a machine that has a GPU, beside what nvidia-smi says of it; elsewhere skipped, with the reason."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess

import pytest

from hwprobe import Gpu, build_affinity_map, probe
from hwprobe.measuring import measure_all
from hwprobe.roofline import lookup

FIELDS = (
    "index,name,uuid,memory.total,compute_cap,clocks.max.sm,power.default_limit,pcie.link.width.max,mig.mode.current"
)


@pytest.fixture(scope="module")
def told() -> dict[str, list[str]]:
    """UUID -> fields, as nvidia-smi tells them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        pytest.skip("there is no nvidia-smi: no GPU to look at")
    command = [program, f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0 or not done.stdout.strip():
        pytest.skip(f"nvidia-smi sees no GPU: {(done.stdout + done.stderr).strip()[:200]}")
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.strip().splitlines()]
    return {row[2]: row for row in rows}


@pytest.fixture(scope="module")
def gpus(told: dict[str, list[str]]) -> tuple[Gpu, ...]:
    return probe(environ={}).gpus


def test_its_facts_are_those_that_nvidia_smi_tells(told: dict[str, list[str]], gpus: tuple[Gpu, ...]) -> None:
    assert {gpu.uuid for gpu in gpus} == set(told)
    for gpu in gpus:
        index, name, _, mib, capability, clock, watts, width, mig = told[gpu.uuid or ""]
        assert (gpu.index, gpu.name, gpu.compute_capability) == (int(index), name, capability)
        assert gpu.memory_bytes is not None
        assert gpu.memory_bytes >> 20 == int(mib)
        assert gpu.clocks.sm_max_hz == float(clock) * 1e6
        assert gpu.power.default_w == pytest.approx(float(watts), abs=0.01)
        assert gpu.pcie.max_width == int(width)
        assert bool(gpu.mig) == (mig == "Enabled")


def test_every_gpu_is_in_the_map_with_figures_of_its_class(gpus: tuple[Gpu, ...]) -> None:
    affinity = build_affinity_map(probe(environ={}))
    names = {name for gpu in gpus for name in gpu.devices}
    assert {device.id for device in affinity.devices if device.id != "cpu"} == names
    known = [device for device in affinity.gpus if lookup(device.name) is not None]
    assert all(device.ridge is not None and device.ridge > 10 for device in known)


def test_it_reaches_a_fair_share_of_its_data_sheet(told: dict[str, list[str]]) -> None:
    """Of a GPU that nobody else uses: more than a fifth of its FLOP/s and a half of its bandwidth, and not above it."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: nothing to measure with")
    for gpu in measure_all(probe(environ={})).gpus:
        claimed = lookup(gpu.name)
        if claimed is None or gpu.measured is None or gpu.processes:
            pytest.skip(f"{gpu.name}: its figures are not known, it could not be measured, or others use it")
        assert 0.2 < gpu.measured.flops / claimed.peak_bf16_flops < 1.05
        assert 0.5 < gpu.measured.bandwidth / claimed.bandwidth < 1.05
