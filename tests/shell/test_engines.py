"""How an engine's load is shown to people."""

from __future__ import annotations

import msgspec

from actors.proxy.engines.load import EngineLoad
from actors.proxy.messages import EngineState
from coordinator.desk.messages import Engines
from coordinator.shell.text import text
from hwprobe.vitals import GpuVitals

ON_GPU = EngineLoad(
    figure="gpu_utilisation",
    load=0.931,
    occupancy=0.5,
    busy=0.75,
    devices=("GPU-1",),
    memory_used=72 << 30,
    memory_total=80 << 30,
)


def shown(load: EngineLoad | None, age_s: float = 0.5) -> str:
    engine = EngineState("engine-0", "serving", "H800", 7, 5, 1, trajectories=12, load=load, load_age_s=age_s)
    return answer(engine)[1]


def answer(*engines: EngineState) -> list[str]:
    return text(Engines(list(engines), 2, 1234, {"moved_running": 3})).splitlines()


def test_the_figure_is_called_what_it_is() -> None:
    assert "93% gpu utilisation, 72 GiB" in shown(ON_GPU)
    assert "50% occupancy" in shown(EngineLoad(figure="occupancy", load=0.5, occupancy=0.5, busy=0.75))


def test_what_is_not_known_is_not_shown_as_if_it_were() -> None:
    assert "? gpu utilisation, 72 GiB" in shown(msgspec.structs.replace(ON_GPU, load=None))
    assert "not told" in shown(None)
    assert "not told for 61 s" in shown(ON_GPU, age_s=61.0)
    assert "93%" not in shown(ON_GPU, age_s=61.0)


ON_CPU = EngineLoad(figure="occupancy", load=0.5, occupancy=0.5, busy=0.75)


def test_the_gpus_of_engines_are_shown_with_what_they_tell() -> None:
    vitals = GpuVitals(memory_busy=0.42, power_w=612.4, temperature_c=71.2, pcie_sent=3 * 2**20, pcie_received=2**10)
    load = msgspec.structs.replace(ON_GPU, vitals=vitals, errors=2)
    engines = [
        EngineState("engine-0", "serving", "H800", 7, 5, 1, load=load, load_age_s=0.5),
        EngineState("engine-1", "serving", "CPU", 7, 5, 1, load=ON_CPU, load_age_s=0.5),
        EngineState("engine-2", "serving", "H800", 7, 5, 1, load=load, load_age_s=61.0),  # an old word
        EngineState("engine-3", "serving", "H800", 7, 5, 1, load=None),
    ]
    lines = answer(*engines)
    (head,) = [number for number, line in enumerate(lines) if line.startswith("engine ") and "power" in line]
    assert [line.split()[0] for line in lines[head + 1 :]] == ["engine-0"]
    words = lines[head + 1].split("  ")
    assert [word.strip() for word in words if word] == [
        "engine-0",
        "1",
        "93%",
        "72 GiB of 80 GiB",
        "42%",
        "612 W",
        "71 C",
        "3 MiB/s",
        "1 KiB/s",
        "-",
        "-",
        "2",
    ]


def test_a_slice_is_shown_with_what_cannot_be_known_of_it() -> None:
    load = msgspec.structs.replace(ON_GPU, figure="occupancy", load=0.5, missing="NVML tells no utilisation")
    lines = answer(EngineState("engine-0", "serving", "H800", 7, 5, 1, load=load, load_age_s=0.5))
    assert lines[-1] == "engine-0: NVML tells no utilisation"
    assert lines[-2].split()[2] == "-"  # its occupancy is no figure of a GPU


def test_without_gpus_there_is_no_table_of_them() -> None:
    lines = answer(EngineState("engine-1", "serving", "CPU", 7, 5, 1, load=ON_CPU, load_age_s=0.5))
    assert not any("power" in line for line in lines)
