"""Which counters and gauges of a run Prometheus sees, and under which names.

Invariant: a name says its unit (seconds, bytes) or that it counts (``_total``), begins with ``rollart_``, and means the
same on every node; labels are ``node``, ``actor``, ``lane``, ``engine``, ``host``, ``shard`` and the kind of what is
counted. A node that did not answer has no figures but ``rollart_up`` 0, a host of which none did ``rollart_host_up`` 0.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

from actors.core.metrics import BOUNDS_S, ActorDescription, Description
from actors.env.messages import EnvState
from actors.proxy.engines.load import EngineLoad
from actors.proxy.messages import ProxyState
from coordinator.admin import RunState
from coordinator.desk.exposition import Exposition
from coordinator.desk.messages import Survey
from coordinator.messages import HostList
from coordinator.metadata.measured import BOUNDS_S as STORE_BOUNDS_S
from coordinator.metadata.measured import Shard
from coordinator.scheduling.ledger import Balance
from coordinator.scheduling.rolling import RollingScheduler
from hwprobe.host_usage import HostReading


async def add_nodes(text: Exposition, survey: Survey) -> None:
    """What every node says of itself; other work of the event loop goes on between two of them."""
    for node in survey.nodes:
        up = node.description is not None
        text.gauge("rollart_up", "Whether a node of the run answered.", up, node=node.name)
        if node.description is not None:
            _add_node(text, node.name, node.description)
            await asyncio.sleep(0)


def _add_node(text: Exposition, node: str, found: Description) -> None:
    if found.process is not None:
        cpu, memory = "Processor time of a node's process.", "Memory of a node's process."
        text.counter("rollart_process_cpu_seconds", cpu, found.process.cpu_s, node=node)
        text.gauge("rollart_process_resident_memory_bytes", memory, found.process.resident_bytes, node=node)
    for event, count in sorted(found.counters.items()):
        text.counter(
            "rollart_node_events", "Events of a node and its connections, by kind.", count, node=node, event=event
        )
    for kind, count in sorted(found.unfinished.items()):
        text.gauge("rollart_node_unfinished", "Asks and streams under way, by kind.", count, node=node, kind=kind)
    for kind, count in sorted(found.objects.items()):
        text.gauge("rollart_node_objects", "Objects that a node holds, and their bytes.", count, node=node, kind=kind)
    for actor, described in found.actors.items():
        _add_actor(text, node, actor, described)


def _add_actor(text: Exposition, node: str, actor: str, found: ActorDescription) -> None:
    queued, failures = "Messages in an actor's mailbox.", "Handlers of an actor that raised."
    text.gauge("rollart_actor_queue_length", queued, found.queued, node=node, actor=actor)
    for lane, count in found.lanes.items():
        text.counter(
            "rollart_actor_messages", "Messages an actor took, by lane.", count, node=node, actor=actor, lane=lane
        )
    text.histogram(
        "rollart_actor_handler_seconds",
        "How long the handlers of an actor took.",
        found.latency,
        BOUNDS_S,
        found.took_s,
        node=node,
        actor=actor,
    )
    text.counter("rollart_actor_failures", failures, found.failures, node=node, actor=actor)
    text.counter("rollart_actor_cancelled", "Asks that their askers gave up.", found.cancelled, node=node, actor=actor)
    text.counter(
        "rollart_actor_dead_letters", "Messages an actor did not take.", found.dead_letters, node=node, actor=actor
    )


def add_host(text: Exposition, host: str, reading: HostReading | None) -> None:
    """How busy a host is, as its kernel counts; what that does not tell has no figure."""
    text.gauge("rollart_host_up", "Whether a node of a host said how busy that is.", reading is not None, host=host)
    if reading is None:
        return
    processors = "Time of all processors of a host, by what they did: busy, idle, or idle while a disk was waited for."
    for mode, seconds in (("busy", reading.busy_s), ("idle", reading.idle_s), ("disk_wait", reading.disk_wait_s)):
        if seconds is not None:
            text.counter("rollart_host_cpu_seconds", processors, seconds, host=host, mode=mode)
    if reading.memory_total is not None:
        text.gauge("rollart_host_memory_bytes", "Memory of a host.", reading.memory_total, host=host)
    if reading.memory_available is not None:
        available = "Memory of a host that programs could still have."
        text.gauge("rollart_host_memory_available_bytes", available, reading.memory_available, host=host)
    waits = "Time in which something on a host waited for a resource (some), or nothing could go on for it (full)."
    for resource, pressure in reading.pressure.items():
        for stall, seconds in (("some", pressure.some_s), ("full", pressure.full_s)):
            if seconds is not None:
                where = {"host": host, "resource": resource, "stall": stall}
                text.counter("rollart_host_pressure_seconds", waits, seconds, **where)
    for name, nic in reading.nics.items():
        where = {"host": host, "interface": name}
        text.counter("rollart_host_network_received_bytes", "What an interface received.", nic.received, **where)
        text.counter("rollart_host_network_sent_bytes", "What an interface sent.", nic.sent, **where)
        lost = "Packets of an interface with errors, and those dropped, both ways."
        text.counter("rollart_host_network_lost_packets", lost, nic.lost, **where)
    for name, disk in reading.disks.items():
        where = {"host": host, "disk": name}
        text.counter("rollart_host_disk_read_bytes", "What was read from a disk.", disk.read, **where)
        text.counter("rollart_host_disk_written_bytes", "What was written to a disk.", disk.written, **where)
        text.counter("rollart_host_disk_busy_seconds", "Time in which a disk had work.", disk.busy_s, **where)


def add_run(text: Exposition, run: RunState, scheduler: RollingScheduler) -> None:
    """How far the run is."""
    phase = run.phase if run.going.is_set() else "paused"
    for state in ("starting", "running", "paused", "stopping"):
        text.gauge("rollart_run_state", "1 for the state a run is in.", phase == state, run=run.run, state=state)
    text.gauge("rollart_learner_version", "Optimiser steps done, which is the learner's version.", scheduler.version)
    text.gauge("rollart_run_elapsed_seconds", "Since this sitting of the run began.", time.monotonic() - run.started)
    text.gauge("rollart_alpha", "The staleness bound.", scheduler.rules.alpha)
    text.gauge("rollart_groups_capacity", "Groups that may be in flight, buffered or taken.", scheduler.rules.capacity)
    text.gauge("rollart_groups_complete", "Groups that are ready to be trained on.", scheduler.complete_groups)
    if run.fluctuation is not None:
        about = "Standard deviation over mean of the last 20 evaluations."
        text.gauge("rollart_evaluation_fluctuation", about, run.fluctuation)
    for name, value in (("reward", run.reward), ("success", run.success), ("evaluation", run.evaluation)):
        if value is not None:
            text.gauge(f"rollart_{name}", f"Mean {name} of the last step or evaluation.", value)
    add_balance(text, scheduler.ledger.balance())


def add_balance(text: Exposition, balance: Balance) -> None:
    """The ledger: admitted = trained + lost + evicted + in flight + buffered + taken."""
    live, ended = "Trajectories that have not ended, by state.", "Trajectories that have ended, by how and why."
    text.counter("rollart_trajectories_admitted", "Trajectories that were ever begun.", balance.admitted)
    for state in ("in_flight", "buffered", "taken"):
        text.gauge("rollart_trajectories", live, getattr(balance, state), state=state)
    text.counter("rollart_trajectories_ended", ended, balance.trained, outcome="trained", reason="")
    for outcome, reasons in (("lost", balance.lost), ("evicted", balance.evicted)):
        for reason, count in sorted(reasons.items()):
            text.counter("rollart_trajectories_ended", ended, count, outcome=outcome, reason=reason)


def add_proxy(text: Exposition, state: ProxyState) -> None:
    """The engines, as the proxy sees them."""
    for engine in state.engines:
        where = {"engine": engine.name, "hardware_class": engine.hardware_class}
        text.gauge("rollart_engine_serving", "Whether an engine serves.", engine.state == "serving", **where)
        text.gauge("rollart_engine_requests", "Requests at an engine.", engine.in_flight, **where)
        text.counter("rollart_engine_restarts", "How often an engine was started again.", engine.restarts, **where)
        trajectories = "Trajectories that have their prefix at an engine."
        text.gauge("rollart_engine_trajectories", trajectories, engine.trajectories, **where)
        if engine.load is not None:
            add_load(text, engine.load, engine.load_age_s, where)
        if engine.version is not None:
            text.gauge("rollart_engine_version", "The version an engine has proven to hold.", engine.version, **where)
    text.gauge("rollart_proxy_queued_requests", "Requests that no engine can take yet.", state.queued)
    text.counter("rollart_sampled_tokens", "Tokens that the engines sampled in this sitting.", state.tokens)
    for event, count in sorted(state.counters.items()):
        text.counter("rollart_proxy_events", "Events of the proxy, by kind.", count, event=event)


VITALS = {
    "memory_busy": ("memory_busy_ratio", "Share of time in which memory was read or written, of the busiest"),
    "power_w": ("power_watts", "Power"),
    "temperature_c": ("temperature_celsius", "Temperature of the hottest"),
    "pcie_sent": ("pcie_sent_bytes_per_second", "What left over PCIe"),
    "pcie_received": ("pcie_received_bytes_per_second", "What came over PCIe"),
    "nvlink_sent": ("nvlink_sent_bytes_per_second", "What left over NVLink"),
    "nvlink_received": ("nvlink_received_bytes_per_second", "What came over NVLink"),
}
"""Fields of ``GpuVitals`` that a GPU may not have, and then has no figure here."""


def add_load(text: Exposition, load: EngineLoad, age_s: float, where: dict[str, str]) -> None:
    """What an engine said last of how loaded it is. A GPU that does not answer has no utilisation here."""
    text.gauge("rollart_engine_load_age_seconds", "Since an engine said how loaded it is.", age_s, **where)
    occupancy, busy = "Share of a running batch's places in use.", "Share of its time in which an engine ran a step."
    text.gauge("rollart_engine_occupancy_ratio", occupancy, load.occupancy, **where)
    text.gauge("rollart_engine_busy_ratio", busy, load.busy, **where)
    if load.figure == "gpu_utilisation" and load.load is not None:
        utilisation = "Utilisation of an engine's busiest GPU, by its driver."
        text.gauge("rollart_engine_gpu_utilisation_ratio", utilisation, load.load, **where)
    if load.devices:
        used, total = "Memory in use on an engine's GPUs.", "Memory of an engine's GPUs."
        text.gauge("rollart_engine_gpu_memory_used_bytes", used, load.memory_used, **where)
        text.gauge("rollart_engine_gpu_memory_bytes", total, load.memory_total, **where)
    for field, (name, purpose) in VITALS.items():
        value = getattr(load.vitals, field)
        if value is not None:
            text.gauge(f"rollart_engine_gpu_{name}", f"{purpose} of an engine's GPUs, by their driver.", value, **where)
    failures = "Queries to the driver of an engine's GPUs that failed."
    text.counter("rollart_engine_gpu_errors", failures, load.errors, **where)


def add_environments(text: Exposition, states: Sequence[EnvState]) -> None:
    """The env hosts together."""
    running = Counter(one.state for state in states for one in state.running)
    for waiting_for, count in sorted(running.items()):
        text.gauge("rollart_env_running", "Running trajectories by what they wait for.", count, waiting_for=waiting_for)
    events: Counter[str] = Counter()
    for state in states:
        events.update(state.counters)
    for event, count in sorted(events.items()):
        text.counter("rollart_env_events", "Events of the env hosts, by kind.", count, event=event)


def add_hosts(text: Exposition, hosts: HostList) -> None:
    """Who would lead the run on, and who is left out of it."""
    standing, barred = "Standby coordinators beside spares.", "Hosts in quarantine."
    text.gauge("rollart_standby_coordinators", standing, sum(host.standby for host in hosts.hosts))
    text.gauge("rollart_hosts_quarantined", barred, sum(host.state == "quarantined" for host in hosts.hosts))


def add_shards(text: Exposition, shards: Sequence[Shard]) -> None:
    """The metadata store."""
    for shard in shards:
        for one in shard.operations:
            where = {"shard": shard.name, "operation": one.operation}
            seconds, failures = "How long calls of the metadata store took.", "Calls of the metadata store that failed."
            text.histogram("rollart_store_call_seconds", seconds, one.counts, STORE_BOUNDS_S, one.seconds, **where)
            text.counter("rollart_store_failures", failures, one.failures, **where)
