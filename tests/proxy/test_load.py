"""How loaded an engine is, and what that figure is called."""

from __future__ import annotations

import msgspec
import pytest

from actors.proxy.engines.load import LoadMeter, engine_load
from hwprobe.telemetry import GpuFigures, State


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def figures(state: State, samples: int, utilisation: float | None) -> GpuFigures:
    return GpuFigures(
        state=state,
        samples=samples,
        utilisation=utilisation,
        memory_used=3,
        memory_total=8,
        devices=("GPU-1",),
        errors={"a": 2, "b": 1},
    )


def test_occupancy_and_busy_share_are_means_over_the_time_since_the_last_report() -> None:
    """Four places. 2 s with one request that runs, 1 s with six (all places taken), 1 s with none: (0.5 + 1) / 4."""
    clock = Clock()
    meter = LoadMeter(4, clock)
    meter.note(1, stepping=True)
    clock.now += 2.0
    meter.note(6)
    clock.now += 1.0
    meter.note(0)
    clock.now += 1.0
    assert meter.take() == (0.375, 0.5)
    meter.note(4, stepping=True)
    clock.now += 3.0
    assert meter.take() == (1.0, 1.0), "in the middle of a long step"
    assert meter.take() == (1.0, 1.0), "asked twice at once"


def test_without_a_gpu_the_share_of_places_decides_and_is_called_so() -> None:
    for gpus in (None, figures("absent", 0, None)):
        load = engine_load(0.25, 0.5, gpus)
        assert (load.figure, load.load, load.occupancy, load.busy, load.devices) == ("occupancy", 0.25, 0.25, 0.5, ())


def test_with_a_gpu_its_utilisation_decides() -> None:
    load = engine_load(0.25, 0.5, figures("measuring", 2, 0.9))
    assert (load.figure, load.load, load.occupancy) == ("gpu_utilisation", 0.9, 0.25)
    assert (load.memory_used, load.memory_total, load.devices, load.errors) == (3, 8, ("GPU-1",), 3)


@pytest.mark.parametrize("gpus", [figures("measuring", 0, None), figures("starting", 0, None)])
def test_a_gpu_that_is_silent_has_no_load_rather_than_another(gpus: GpuFigures) -> None:
    load = engine_load(0.25, 0.5, gpus)
    assert (load.figure, load.load, load.occupancy) == ("gpu_utilisation", None, 0.25)


def test_a_gpu_that_has_no_such_figure_is_judged_by_its_places() -> None:
    slices = msgspec.structs.replace(figures("measuring", 1, None), missing="no such figure of a slice")
    load = engine_load(0.25, 0.5, slices)
    assert (load.figure, load.load, load.devices) == ("occupancy", 0.25, ("GPU-1",))
    assert load.missing == "no such figure of a slice"
