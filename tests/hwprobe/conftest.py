"""A fake NVML, built once and loaded by the real bindings in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hwprobe import AffinityMap, Hardware, ResourceProfile
from hwprobe.host import HostFacts

SOURCE = Path(__file__).with_name("fake_nvml.c")
ROOT = Path(__file__).resolve().parents[2]

CHILD = """
import time
import sys
from pathlib import Path
import msgspec
import pynvml  # before the clock starts: importing it takes long on a busy machine
from hwprobe import ResourceProfile, build_affinity_map, probe
from hwprobe.host import HostFacts

order = msgspec.json.decode(sys.stdin.buffer.read())
begun = time.monotonic()
hardware = probe(
    Path(order["sysfs"]),
    proc=Path(order["proc"]),
    host=msgspec.convert(order["facts"], HostFacts),
    name="node-a",
    run=Path(order["run"]),
    nvml_timeout_s=order["nvml_timeout_s"],
    query_timeout_s=order["query_timeout_s"],
)
seconds = time.monotonic() - begun
affinity = build_affinity_map(hardware, msgspec.convert(order["profile"], ResourceProfile))
sys.stdout.buffer.write(msgspec.json.encode({"hardware": hardware, "affinity": affinity, "seconds": seconds}))
"""


class Answer(msgspec.Struct, frozen=True):
    """What a process with the fake library found."""

    hardware: Hardware
    affinity: AffinityMap
    seconds: float  # that probing took


ProbeWithFake = Callable[..., Answer]


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with libnvidia-ml.so.1, for LD_LIBRARY_PATH."""
    folder = tmp_path_factory.mktemp("nvml")
    library = folder / "libnvidia-ml.so.1"
    command = ["gcc", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", str(library), str(SOURCE)], check=True, timeout=60)
    return folder


@pytest.fixture
def probe_with_fake(fake_nvml: Path) -> ProbeWithFake:
    """Probe a synthetic tree in a process that loads the fake library; keywords are FAKE_NVML_* variables."""

    def run(
        tree: tuple[Path, Path, HostFacts],
        *,
        profile: ResourceProfile | None = None,
        visible: str | None = None,
        nvml_timeout_s: float | None = 30.0,
        query_timeout_s: float = 30.0,
        **variables: str,
    ) -> Answer:
        sysfs, proc, facts = tree
        order: dict[str, Any] = {
            "sysfs": str(sysfs),
            "proc": str(proc),
            "run": str(proc.parent / "run"),
            "facts": msgspec.to_builtins(facts),
            "profile": msgspec.to_builtins(profile if profile is not None else ResourceProfile()),
            "nvml_timeout_s": nvml_timeout_s,
            "query_timeout_s": query_timeout_s,
        }
        environ = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
        environ |= {f"FAKE_NVML_{key.upper()}": value for key, value in variables.items()}
        environ |= {"LD_LIBRARY_PATH": str(fake_nvml), "PYTHONPATH": str(ROOT)}
        if visible is not None:
            environ["CUDA_VISIBLE_DEVICES"] = visible
        done = subprocess.run(
            [sys.executable, "-c", CHILD],
            input=msgspec.json.encode(order),
            env=environ,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        return msgspec.json.decode(done.stdout, type=Answer)

    return run
