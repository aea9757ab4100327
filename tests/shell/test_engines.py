"""How an engine's load is shown to people."""

from __future__ import annotations

import msgspec

from actors.proxy.engines.load import EngineLoad
from actors.proxy.messages import EngineState
from coordinator.desk.messages import Engines
from coordinator.shell.text import text

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
    return text(Engines([engine], 2, 1234, {"moved_running": 3})).splitlines()[-3]


def test_the_figure_is_called_what_it_is() -> None:
    assert "93% gpu utilisation, 72 GiB" in shown(ON_GPU)
    assert "50% occupancy" in shown(EngineLoad(figure="occupancy", load=0.5, occupancy=0.5, busy=0.75))


def test_what_is_not_known_is_not_shown_as_if_it_were() -> None:
    assert "? gpu utilisation, 72 GiB" in shown(msgspec.structs.replace(ON_GPU, load=None))
    assert "not told" in shown(None)
    assert "not told for 61 s" in shown(ON_GPU, age_s=61.0)
    assert "93%" not in shown(ON_GPU, age_s=61.0)
