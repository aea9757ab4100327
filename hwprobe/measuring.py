"""What devices really do, beside what is claimed of them.

Invariant: each device is measured in a child process with a time limit, one after the other, so that neither a hang nor
a crash of a driver reaches this one; a device that could not be measured is a finding and keeps its claimed figures.

A healthy GPU reaches 0.6 to 0.9 of its data sheet in a large matrix product (less where power limits it first) and 0.8
to 0.95 of its bandwidth in a copy. Below half and below 0.6 something holds it back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from hwprobe.gpu import Gpu, Rates
from hwprobe.hardware import Cpu, Finding, Hardware
from hwprobe.roofline import lookup

SCRIPT = Path(__file__).with_name("torch_rates.py")

TIMEOUT_S = 120.0
"""For one device: loading torch and waking up a GPU take most of it."""

LEAST_COMPUTE, LEAST_BANDWIDTH = 0.5, 0.6
"""Shares of the claimed figures."""

Measure = Callable[[str, str, Mapping[str, str]], Rates]
"""(cuda or cpu, data type, environment) -> rates. Raises ``NotMeasured``."""


class NotMeasured(RuntimeError):
    """The message says why."""


def measure_all(hardware: Hardware, *, only_unknown: bool = False, measure: Measure | None = None) -> Hardware:
    """The hardware with measured figures, and what they tell. ``only_unknown``: GPUs that the table lacks."""
    measure = measure if measure is not None else measure_in_child
    findings: list[Finding] = list(hardware.findings)
    gpus = []
    for gpu in hardware.gpus:
        wanted = not gpu.mig and not (only_unknown and lookup(gpu.name) is not None)
        gpus.append(_measured_gpu(gpu, measure, findings) if wanted else gpu)
    cpu = hardware.cpu if only_unknown else _measured_cpu(hardware.cpu, measure, findings)
    return msgspec.structs.replace(hardware, gpus=tuple(gpus), cpu=cpu, findings=tuple(findings))


def _measured_gpu(gpu: Gpu, measure: Measure, findings: list[Finding]) -> Gpu:
    subject = f"gpu{gpu.index}"
    names = dict(os.environ) | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpu.uuid or str(gpu.index)}
    try:
        rates = measure("cuda", "bf16", names)
    except NotMeasured as error:
        findings.append(Finding("not_measured", "warning", (subject,), str(error)))
        return gpu
    claimed = lookup(gpu.name)
    if claimed is not None:
        findings += _slow(subject, rates, claimed.peak_bf16_flops, claimed.bandwidth, gpu)
    return msgspec.structs.replace(gpu, measured=rates)


def _measured_cpu(cpu: Cpu, measure: Measure, findings: list[Finding]) -> Cpu:
    """In the type that it is fastest with: without matrix units bf16 is computed in float32."""
    try:
        rates = measure(
            "cpu", "bf16" if cpu.isa == "amx_bf16" else "fp32", os.environ | {"OMP_NUM_THREADS": str(cpu.usable)}
        )
    except NotMeasured as error:
        findings.append(Finding("not_measured", "warning", ("cpu",), str(error)))
        return cpu
    return msgspec.structs.replace(cpu, measured=rates)


def _slow(subject: str, rates: Rates, flops: float, bandwidth: float, gpu: Gpu) -> list[Finding]:
    found = []
    if rates.flops < LEAST_COMPUTE * flops:
        found.append(f"{rates.flops / 1e12:.0f} of {flops / 1e12:.0f} TFLOP/s")
    if rates.bandwidth < LEAST_BANDWIDTH * bandwidth:
        found.append(f"{rates.bandwidth / 1e9:.0f} of {bandwidth / 1e9:.0f} GB/s")
    if not found:
        return []
    others = f"; {len(gpu.processes)} other processes compute on it" if gpu.processes else ""
    held = f"; its clocks are held down: {', '.join(gpu.throttled_by)}" if gpu.throttled_by else ""
    detail = f"measured {' and '.join(found)}{held}{others}"
    remedy = "see to power, cooling and clocks (nvidia-smi -q -d PERFORMANCE,CLOCK,POWER), and to what else runs on it"
    return [Finding("slower_than_claimed", "warning", (subject,), detail, remedy)]


def measure_in_child(device: str, dtype: str, environ: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> Rates:
    """In a process that loads torch. Raises ``NotMeasured``."""
    command = [sys.executable, "-P", str(SCRIPT), device, dtype]  # -P: this folder must not shadow the library
    try:
        done = subprocess.run(
            command, env=dict(environ), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise NotMeasured(f"the measurement did not end within {timeout_s:g} s") from None
    except OSError as error:
        raise NotMeasured(f"the measurement could not be started: {error}") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise NotMeasured(f"the measurement failed: {last[:200]}")
    figures = json.loads(done.stdout.splitlines()[-1])
    return Rates(flops=figures["flops"], bandwidth=figures["bandwidth"], dtype="bf16" if dtype == "bf16" else "fp32")
