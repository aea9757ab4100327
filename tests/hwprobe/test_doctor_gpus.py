"""The health of GPUs through the real bindings over a fake NVML, and the kernel's log of them.

The lines of the log are made up, in the format of NVIDIA's "XID Errors" (docs.nvidia.com/deploy/xid-errors): it takes a
GPU that fails to have real ones. Some are in a file, within a record of /dev/kmsg (Documentation/ABI/testing/dev-kmsg),
and one goes through the kernel's own log.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hwprobe.doctor import Examined, Unable, gpus
from hwprobe.doctor.kernel_log import LOG, Xid, read_xids
from tests.hwprobe.conftest import ROOT

H800 = "NVIDIA H800|81559"
LOOK = """
import sys
from pathlib import Path
import msgspec
import pynvml
from hwprobe.doctor import gpus
sys.stdout.buffer.write(msgspec.json.encode(gpus.look(Path(sys.argv[1]), 30.0)))
"""
RECORDS = """\
6,1041,61230000,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15
3,1042,61234567,-;NVRM: Xid (PCI:0000:1A:00): 79, pid=1234, name=python, GPU has fallen off the bus.
4,1043,61234890,-;NVRM: Xid (PCI:0000:1b:00): 31, pid=77, name=python, Ch 00000010, intr 00000000. MMU Fault
 SUBSYSTEM=pci
"""


def look(folder: Path, log: Path, **variables: str) -> Examined:
    environ = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    environ |= {f"FAKE_NVML_{key.upper()}": value for key, value in variables.items()}
    environ |= {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(log)], env=environ, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return msgspec.json.decode(done.stdout, type=Examined)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    path.write_text("6,1,0,-;Linux version 6.1\n")
    return path


def test_healthy_gpus_give_no_finding(fake_nvml: Path, log: Path) -> None:
    examined = look(fake_nvml, log, gpus=";".join([H800] * 8), links="8")
    assert examined.findings == []
    assert examined.notes == ["8 x NVIDIA H800"]


def test_a_gpu_that_does_not_say_how_it_is_counts_as_healthy(fake_nvml: Path, log: Path) -> None:
    faults = (
        "*:nvmlDeviceGetTotalEccErrors:3;*:nvmlDeviceGetRemappedRows:3;*:nvmlDeviceGetCurrentClocksThrottleReasons:3"
    )
    assert look(fake_nvml, log, gpus=H800, faults=faults).findings == []


def test_bad_memory_and_slow_clocks_are_found_by_gpu(fake_nvml: Path, log: Path) -> None:
    wrong = {
        "0:nvmlDeviceGetCurrentClocksThrottleReasons": 64,  # nvmlClocksEventReasonHwThermalSlowdown
        "1:nvmlDeviceGetTotalEccErrors.1": 3,  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        "2:nvmlDeviceGetCurrentClocksThrottleReasons": 4,  # nvmlClocksEventReasonSwPowerCap: under load, as it should
        "3:nvmlDeviceGetRemappedRows.3": 1,
    }
    values = ";".join(f"{what}:{number}" for what, number in wrong.items())
    examined = look(fake_nvml, log, gpus=";".join([H800] * 4), values=values)
    found = {one.subject: one for one in examined.findings}
    assert {name: one.severity for name, one in found.items()} == {"gpu0": "warning", "gpu1": "error", "gpu3": "error"}
    assert "hardware_thermal" in found["gpu0"].evidence
    assert found["gpu0"].cause == "it is too hot, or its power is not what it needs"
    assert "3 uncorrected errors" in found["gpu1"].evidence
    assert "gpu-reset" in found["gpu1"].remedy
    assert found["gpu3"].remedy == "replace the GPU"


def test_a_lost_gpu_and_a_driver_that_does_not_start_are_errors(fake_nvml: Path, log: Path) -> None:
    (lost,) = look(fake_nvml, log, gpus=f"{H800};{H800}", faults="1:nvmlDeviceGetName:15").findings
    assert (lost.severity, lost.subject) == ("error", "gpu1")
    assert lost.cause == "the GPU has fallen off the bus, or wants a reset"
    (driver,) = look(fake_nvml, log, gpus=H800, faults="-:nvmlInitWithFlags:18").findings
    assert driver.cause == "the driver was updated under a running kernel"


def test_errors_in_the_kernels_log_are_told_from_those_of_programs(fake_nvml: Path, log: Path) -> None:
    log.write_text(RECORDS)
    assert read_xids(log) == [
        Xid("0000:1a:00", 79, "pid=1234, name=python, GPU has fallen off the bus."),
        Xid("0000:1b:00", 31, "pid=77, name=python, Ch 00000010, intr 00000000. MMU Fault"),
    ]
    examined = look(fake_nvml, log, gpus=H800)
    (finding,) = examined.findings
    assert (finding.severity, finding.subject, finding.cause) == (
        "error",
        "GPU at 0000:1a:00",
        "the GPU has fallen off the bus",
    )
    assert "GPU at 0000:1b:00: Xid 31, once; a program's doing, as a rule" in examined.notes


def test_an_error_is_found_in_the_kernels_own_log(fake_nvml: Path) -> None:
    """The line stays there until the next boot, so it names a card that no host has, and another one each time."""
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there are GPUs here: the doctor would tell of this line until the next boot")
    pci = f"{random.SystemRandom().randrange(0x8000, 0x10000):04x}:3b:00"  # domains of hosts are small numbers
    try:
        with open(os.open(LOG, os.O_RDWR), "wb", buffering=0) as kernel:  # not to be made where there is none
            kernel.write(f"NVRM: Xid (PCI:{pci}): 79, pid=77, name=a-test, GPU has fallen off the bus.\n".encode())
    except OSError as error:
        pytest.skip(f"{LOG} cannot be read and written: {error.strerror}")
    found = {one.subject: one for one in look(fake_nvml, LOG, gpus=H800).findings}
    finding = found[f"GPU at {pci}"]
    assert (finding.severity, finding.cause) == ("error", "the GPU has fallen off the bus")
    assert finding.evidence.startswith("Xid 79, once since the host's start, last: pid=77, name=a-test, GPU has fallen")
    assert f"nvidia-smi --gpu-reset -i {pci}" in finding.remedy


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there are GPUs here")
def test_a_machine_without_gpus_is_healthy(log: Path) -> None:
    with pytest.raises(Unable, match="no GPU"):
        gpus.look(log)
