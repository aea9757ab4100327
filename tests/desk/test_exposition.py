"""What is spelled is what Prometheus reads: its own client library's parser is the judge."""

from __future__ import annotations

import math
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from actors.core.metrics import ActorDescription, Description
from actors.env.messages import EnvState, RunningTrajectory
from actors.proxy.engines.load import EngineLoad
from actors.proxy.messages import EngineState, ProxyState
from bus.message import NodeAddress
from coordinator.admin import RunState
from coordinator.desk import figures
from coordinator.desk.exposition import Exposition
from coordinator.desk.messages import SeenNode, Survey
from coordinator.messages import HostFacts, HostList
from coordinator.metadata.measured import Shard
from coordinator.scheduling.ledger import Balance, Ledger
from coordinator.scheduling.rolling import RollingScheduler, Rules
from hwprobe.host_usage import DiskCounters, HostReading, NicCounters, Pressure
from hwprobe.vitals import GpuVitals

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Samples:
    """Every sample by its name and labels, as Prometheus' own parser reads them."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@given(st.text(st.characters(exclude_categories=["Cs"])), st.floats())
def test_any_label_and_any_number_is_read_back_as_it_was(label: str, value: float) -> None:
    text = Exposition()
    text.gauge("a_gauge", "Anything\nat \\ all.", value, name=label)
    ((name, labels), found) = next(iter(parsed(str(text)).items()))
    assert (name, labels) == ("a_gauge", (("name", label),))
    assert found == value or (math.isnan(found) and math.isnan(value))


def test_counters_and_histograms_are_spelled_as_the_client_library_spells_them() -> None:
    registry = CollectorRegistry()
    counter = Counter("messages", "Messages.", ["lane"], registry=registry)
    histogram = Histogram("took_seconds", "Took.", buckets=(0.1, 1.0), registry=registry)
    counter.labels(lane="bulk").inc(3)
    for seconds in (0.05, 0.5, 0.6, 20.0):
        histogram.observe(seconds)
    text = Exposition()
    text.counter("messages", "Messages.", 3, lane="bulk")
    text.histogram("took_seconds", "Took.", [1, 2, 1], (0.1, 1.0), 21.15)
    spelled = parsed(generate_latest(registry).decode())
    theirs = {key: value for key, value in spelled.items() if "_created" not in key[0]}
    assert parsed(str(text)) == pytest.approx(theirs)


def test_samples_of_one_metric_stand_together_whatever_comes_between() -> None:
    text = Exposition()
    for node in ("a", "b"):
        text.gauge("first", "First.", 1, node=node)
        text.gauge("second", "Second.", 2, node=node)
    lines = str(text).splitlines()
    assert lines == [
        "# HELP first First.",
        "# TYPE first gauge",
        'first{node="a"} 1',
        'first{node="b"} 1',
        "# HELP second Second.",
        "# TYPE second gauge",
        'second{node="a"} 2',
        'second{node="b"} 2',
    ]


def description() -> Description:
    actor = ActorDescription(
        kind="Engine",
        queued=4,
        handled=3,
        lanes={"control": 1, "bulk": 0, "local": 2},
        latency=[3, 0, 0, 0, 0, 0, 0, 0],
        failures=1,
        cancelled=0,
        dead_letters=0,
        handling="",
        handling_s=0.0,
        took_s=0.5,
    )
    address = NodeAddress("engine-0", "c", "b", 1)
    return Description("engine-0", address, {"resent": 2}, {"asks": 1}, 0, {"engine": actor}, [])


READING = HostReading(
    at_s=5.0,
    busy_s=12.5,
    idle_s=100.0,
    disk_wait_s=0.25,
    memory_total=64 << 30,
    memory_available=48 << 30,
    nics={"eth0": NicCounters(1000, 2000, 3)},
    disks={"nvme0n1": DiskCounters(4096, 8192, 1.5)},
    pressure={"memory": Pressure(2.5, 1.0), "cpu": Pressure(0.5, None)},
)
UNTOLD = HostReading(
    at_s=5.0, busy_s=None, idle_s=None, disk_wait_s=None, memory_total=None, memory_available=None, nics={}
)
"""Of a kernel that says nothing."""


async def everything() -> str:
    """All figures that there are, of a small run with a silent node."""
    text = Exposition()
    nodes = [
        SeenNode("engine-0", "control", [], 0, "c", "", description()),
        SeenNode("engine-1", "control", [], 0, "c", "", None, "no answer within 3 s"),
    ]
    await figures.add_nodes(text, Survey(nodes))
    figures.add_host(text, "10.0.0.1", READING)
    figures.add_host(text, "10.0.0.2", None)
    figures.add_host(text, "10.0.0.3", UNTOLD)
    rules = Rules(groups_per_step=2, group_size=2, alpha=1, redundant_groups=0, temperature=1.0, seed=0)
    figures.add_run(text, RunState("lake", 10), RollingScheduler(rules, Ledger()))
    figures.add_balance(text, Balance(10, 3, {"env_failed": 2}, {"stale": 1}, 1, 2, 1))
    load = EngineLoad(
        figure="gpu_utilisation",
        load=0.93,
        occupancy=0.5,
        busy=0.75,
        devices=("GPU-1",),
        memory_used=3 << 30,
        memory_total=80 << 30,
        errors=2,
        vitals=GpuVitals(power_w=350.5, nvlink_sent=2e9),
    )
    engine = EngineState("engine-0", "serving", "CPU", 7, 5, 1, trajectories=12, load=load, load_age_s=0.5)
    places = msgspec.structs.replace(load, figure="occupancy", load=0.5, devices=())
    silent = msgspec.structs.replace(load, load=None)
    others = [
        msgspec.structs.replace(engine, name="engine-1", load=places),
        msgspec.structs.replace(engine, name="engine-2", load=silent),
        msgspec.structs.replace(engine, name="engine-3", load=None),
    ]
    figures.add_proxy(text, ProxyState([engine, *others], 2, 1234, {"requests_moved": 1}))
    running = RunningTrajectory("t1", 0, "train", 0, None, "engine", 0.1)
    figures.add_environments(text, [EnvState([running], {"stored": 3}), EnvState([running], {"stored": 4})])
    shard = Shard("zk1:2181")
    shard.of("write").took(0.003)
    spare = HostFacts("10.0.0.4", "spare", ["spare-3"], [], True, 0, 0.0)
    barred = HostFacts("10.0.0.2", "quarantined", [], [], False, 3, 540.0)
    figures.add_hosts(text, HostList([barred, spare]))
    figures.add_shards(text, [shard])
    return str(text)


async def test_an_engines_load_is_told_under_the_name_of_what_it_is() -> None:
    found = parsed(await everything())

    def of(name: str, engine: str) -> float | None:
        return found.get((name, (("engine", engine), ("hardware_class", "CPU"))))

    assert of("rollart_engine_gpu_utilisation_ratio", "engine-0") == 0.93
    assert of("rollart_engine_occupancy_ratio", "engine-0") == 0.5
    assert of("rollart_engine_busy_ratio", "engine-0") == 0.75
    assert of("rollart_engine_gpu_memory_used_bytes", "engine-0") == 3 << 30
    assert of("rollart_engine_gpu_memory_bytes", "engine-0") == 80 << 30
    assert of("rollart_engine_gpu_errors_total", "engine-0") == 2
    assert of("rollart_engine_gpu_power_watts", "engine-0") == 350.5
    assert of("rollart_engine_gpu_nvlink_sent_bytes_per_second", "engine-0") == 2e9
    assert of("rollart_engine_gpu_temperature_celsius", "engine-0") is None
    assert of("rollart_engine_load_age_seconds", "engine-0") == 0.5
    assert of("rollart_engine_trajectories", "engine-0") == 12
    assert of("rollart_engine_occupancy_ratio", "engine-1") == 0.5
    assert of("rollart_engine_gpu_memory_bytes", "engine-1") is None
    for engine in ("engine-1", "engine-2", "engine-3"):
        assert of("rollart_engine_gpu_utilisation_ratio", engine) is None
    assert of("rollart_engine_occupancy_ratio", "engine-3") is None


async def test_a_host_is_told_by_its_kernels_counters_in_base_units() -> None:
    found = parsed(await everything())

    def of(name: str, **labels: str) -> float | None:
        return found.get((f"rollart_host_{name}", tuple(sorted({"host": "10.0.0.1", **labels}.items()))))

    assert [of("cpu_seconds_total", mode=mode) for mode in ("busy", "idle", "disk_wait")] == [12.5, 100.0, 0.25]
    assert (of("memory_bytes"), of("memory_available_bytes")) == (64 << 30, 48 << 30)
    assert of("pressure_seconds_total", resource="memory", stall="some") == 2.5
    assert of("pressure_seconds_total", resource="memory", stall="full") == 1.0
    assert of("pressure_seconds_total", resource="cpu", stall="some") == 0.5
    assert of("pressure_seconds_total", resource="cpu", stall="full") is None
    assert of("network_received_bytes_total", interface="eth0") == 1000
    assert of("network_sent_bytes_total", interface="eth0") == 2000
    assert of("network_lost_packets_total", interface="eth0") == 3
    assert of("disk_read_bytes_total", disk="nvme0n1") == 4096
    assert of("disk_written_bytes_total", disk="nvme0n1") == 8192
    assert of("disk_busy_seconds_total", disk="nvme0n1") == 1.5


async def test_a_host_that_is_silent_or_says_nothing_has_no_figure_but_whether_it_is_up() -> None:
    found = parsed(await everything())
    for host, up in (("10.0.0.2", 0), ("10.0.0.3", 1)):
        assert {name: value for (name, labels), value in found.items() if dict(labels).get("host") == host} == {
            "rollart_host_up": up
        }


async def test_a_silent_node_is_down_and_has_no_other_figures() -> None:
    found = parsed(await everything())
    up = {dict(labels)["node"]: value for (name, labels), value in found.items() if name == "rollart_up"}
    assert up == {"engine-0": 1, "engine-1": 0}
    assert [name for name, labels in found if dict(labels).get("node") == "engine-1"] == ["rollart_up"]


async def test_figures_mean_what_the_parts_said() -> None:
    found = parsed(await everything())
    actor = (("actor", "engine"), ("node", "engine-0"))
    assert found["rollart_actor_queue_length", actor] == 4
    assert found["rollart_actor_messages_total", (*actor[:1], ("lane", "local"), *actor[1:])] == 2
    assert found["rollart_actor_handler_seconds_bucket", (*actor[:1], ("le", "0.0001"), *actor[1:])] == 3
    assert found["rollart_actor_handler_seconds_sum", actor] == 0.5
    assert found["rollart_node_events_total", (("event", "resent"), ("node", "engine-0"))] == 2
    assert found["rollart_trajectories_ended_total", (("outcome", "lost"), ("reason", "env_failed"))] == 2
    assert found["rollart_env_events_total", (("event", "stored"),)] == 7
    assert found["rollart_env_running", (("waiting_for", "engine"),)] == 2
    assert (found["rollart_standby_coordinators", ()], found["rollart_hosts_quarantined", ()]) == (1, 1)
    assert (
        found["rollart_store_call_seconds_bucket", (("le", "0.005"), ("operation", "write"), ("shard", "zk1:2181"))]
        == 1
    )
    assert (
        found["rollart_store_call_seconds_bucket", (("le", "0.002"), ("operation", "write"), ("shard", "zk1:2181"))]
        == 0
    )


async def test_the_buckets_of_a_shard_count_what_took_no_longer_than_their_bound() -> None:
    found = parsed(await everything())
    write = (("operation", "write"), ("shard", "zk1:2181"))
    buckets = {
        bound: found["rollart_store_call_seconds_bucket", (("le", bound), *write)] for bound in ("0.002", "0.005")
    }
    assert buckets == {"0.002": 0, "0.005": 1}


async def test_names_keep_to_prometheus_conventions() -> None:
    """https://prometheus.io/docs/practices/naming/: one prefix, base units, counters end in _total."""
    text = await everything()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert len(kinds) > 20
    assert set(kinds) == set(re.findall(r"^# HELP (\S+) \S", text, re.MULTILINE))
    for name, kind in kinds.items():
        assert re.fullmatch(r"rollart_[a-z][a-z_]*[a-z]", name)
        assert name.endswith("_total") == (kind == "counter")
        assert not re.search(r"_(ms|us|kb|mb|minutes)(_|$)", name)
        if kind == "histogram":
            assert name.endswith("_seconds")
