"""Every answer as text for people; ``--json`` prints the same answers as they are."""

from __future__ import annotations

from functools import singledispatch

import msgspec

from actors.core.metrics import BOUNDS_S
from actors.env.messages import Followed
from actors.proxy.messages import CostsState, EngineState
from coordinator.desk.messages import (
    Audit,
    Backlog,
    Engines,
    Hardware,
    MetricsText,
    SeenNode,
    Shards,
    Survey,
    Versions,
)
from coordinator.messages import Changed, HostList, Pools, Status, Trajectories
from coordinator.metadata.measured import BOUNDS_S as STORE_BOUNDS_S
from coordinator.orders import TrajectoryLife
from coordinator.shell.answers import Actors, Helps, Jobs
from coordinator.shell.gpus import STALE_S, gpu_lines
from coordinator.shell.tables import counted, quantile, seconds, size, table
from hwprobe.mapping import describe

SHOWN_ORDERS = 5


@singledispatch
def text(answer: msgspec.Struct) -> str:
    """Raises ``TypeError`` for an answer that no command gives."""
    raise TypeError(f"no text is known for {type(answer).__name__}")


@text.register
def _changed(answer: Changed) -> str:
    return answer.message


@text.register
def _status(status: Status) -> str:
    percent = "-" if status.success is None else f"{status.success:.0%}"
    evaluation = "-" if status.evaluation is None else f"{status.evaluation:.0%}"
    reward = "-" if status.reward is None else f"{status.reward:.3f}"
    lines = [
        f"run {status.run}: {status.state}, step {status.step}/{status.steps}, {status.elapsed_s:.0f} s",
        f"version {status.version}, alpha {status.alpha}, reward {reward}, success {percent}, evaluation {evaluation}",
        f"in flight {status.in_flight}, buffered {status.buffered}, "
        f"groups complete {status.groups_complete} of {status.groups_needed} needed",
        f"trajectories: {status.balance}",
        *([status.steadiness] if status.steadiness else []),
    ]
    lines += [
        f"engine {e.name}: {e.state}, {e.hardware_class}, version {e.version}, in flight {e.in_flight}, "
        f"restarts {e.restarts}"
        for e in status.engines
    ]
    return "\n".join(lines)


@text.register
def _jobs(answer: Jobs) -> str:
    rows = [
        (job.run, job.state, job.step, "-" if job.success is None else f"{job.success:.0%}", job.address)
        for job in answer.jobs
    ]
    return table(("run", "state", "step", "success", "address"), rows, nothing="there are no run directories here")


@text.register
def _survey(answer: Survey) -> str:
    rows = [_node(node) for node in answer.nodes]
    head = (
        "node",
        "state",
        "software",
        "pid",
        "cpu",
        "memory",
        "roles",
        "started by",
        "queued",
        "handled",
        "hardware",
        "address",
    )
    lines = [table(head, rows, nothing="no node has joined")]
    lines += [f"{node.name} did not answer: {node.silence}" for node in answer.nodes if node.description is None]
    return "\n".join(lines)


def _node(node: SeenNode) -> tuple[object, ...]:
    actors = [] if node.description is None else list(node.description.actors.values())
    process = None if node.description is None else node.description.process
    return (
        node.name,
        "up" if node.description is not None else "silent",
        "-" if node.description is None else node.description.software or "unknown",
        node.pid or None,
        "-" if process is None else f"{process.cpu_s:.1f} s",
        "-" if process is None else size(process.resident_bytes),
        ", ".join(node.roles) or ("-" if node.parent else "spare"),
        node.parent or "-",
        sum(actor.queued for actor in actors),
        sum(actor.handled for actor in actors),
        node.hardware or "-",
        node.control,
    )


@text.register
def _actors(answer: Actors) -> str:
    rows = [
        (
            row.actor,
            row.node,
            row.facts.kind,
            row.facts.queued,
            row.facts.handled,
            quantile(row.facts.latency, BOUNDS_S, 0.5),
            quantile(row.facts.latency, BOUNDS_S, 0.99),
            row.facts.failures,
            row.facts.dead_letters,
            f"{row.facts.handling} for {seconds(row.facts.handling_s)}" if row.facts.handling else "-",
        )
        for row in answer.actors
    ]
    head = ("actor", "node", "kind", "queued", "handled", "p50", "p99", "failed", "dead letters", "at work on")
    lines = [table(head, rows, nothing="no actors")]
    lines += [f"{node} did not answer: {silence}" for node, silence in answer.silent.items()]
    lines += [f"{node}: {counted(counters)}" for node, counters in answer.counters.items() if counters]
    return "\n".join(lines)


@text.register
def _pools(answer: Pools) -> str:
    rows = [
        (pool.hardware_class, pool.kind or "-", pool.devices, pool.declared, ", ".join(pool.hosts) or "-")
        for pool in answer.pools
    ]
    head = ("class", "suits", "devices", "declared", "on hosts")
    return "\n".join([table(head, rows, nothing="no devices"), *(f"warning: {warning}" for warning in answer.warnings)])


def _load(engine: EngineState) -> str:
    """ "95% gpu utilisation, 71 GiB", "40% occupancy", or why there is no figure"""
    load = engine.load
    if load is None:
        return "not told"
    figure = load.figure.replace("_", " ")
    if engine.load_age_s > STALE_S:
        return f"not told for {engine.load_age_s:.0f} s"
    share = "?" if load.load is None else f"{load.load:.0%}"
    return f"{share} {figure}" + (f", {size(load.memory_used)}" if load.devices else "")


@text.register
def _hosts(answer: HostList) -> str:
    rows = [
        (
            one.host,
            one.state if one.state != "quarantined" else f"quarantined for {one.barred_s:.0f} s",
            ", ".join(one.roles) or "-",
            "yes" if one.standby else f"no: {one.no_standby}" if one.no_standby else "-",
            one.failures,
            ", ".join(one.nodes) or "-",
        )
        for one in answer.hosts
    ]
    return table(("host", "state", "roles", "standby", "failures", "nodes"), rows, nothing="no host has joined")


@text.register
def _engines(answer: Engines) -> str:
    rows = [
        (e.name, e.state, e.hardware_class, e.version, e.in_flight, e.trajectories, _load(e), e.restarts)
        for e in answer.engines
    ]
    head = ("engine", "state", "class", "version", "in flight", "trajectories", "load", "restarts")
    return "\n".join(
        [
            table(head, rows, nothing="there are no engines"),
            f"waiting for an engine: {answer.queued}; sampled in this sitting: {answer.tokens} tokens",
            f"events: {counted(answer.counters)}",
            *gpu_lines(answer.engines),
        ]
    )


@text.register
def _trajectories(answer: Trajectories) -> str:
    rows = [
        (one.ticket, one.purpose, one.task, one.turns, one.initiating_version, one.state, one.seconds)
        for one in answer.running
    ]
    head = ("ticket", "purpose", "task", "turns", "version", "waits for", "seconds")
    return table(head, rows, nothing="nothing is running")


@text.register
def _queues(answer: Backlog) -> str:
    engines = counted(answer.engines)
    lines = [
        f"admission is {answer.admission}: {answer.groups} groups in flight or buffered, at most {answer.capacity} "
        "with those that are trained on",
        f"next batch: {answer.groups_complete} of {answer.groups_needed} groups complete "
        f"({answer.in_flight} trajectories in flight, {answer.buffered} buffered)",
        f"running trajectories wait for: {counted(answer.waiting, nothing='nothing runs')}",
        f"requests: {answer.proxy} wait for an engine, at engines: {engines}",
        f"mailboxes: {counted(answer.mailboxes, nothing='all empty')}",
    ]
    tickets = answer.tickets
    levels = [(one.name, one.waiting, one.capacity, one.oldest_s, counted(one.flows)) for one in tickets.levels]
    hosts = [(h.node, h.places or None, h.used, h.settling, "draining" if h.draining else "-") for h in tickets.hosts]
    streams = [(one.name or "(all tasks)", f"{one.share:.1%}", one.groups) for one in tickets.streams]
    return "\n".join(
        [
            *lines,
            "",
            f"trajectories that wait to be started ({tickets.starts_per_s:.1f} a second are):",
            table(("level", "waiting", "at most", "oldest, s", "by stream"), levels, nothing="none"),
            "",
            table(("env host", "places", "used", "settling", ""), hosts, nothing="no env host"),
            *(["", table(("stream", "share", "groups so far"), streams, nothing="")] if streams else []),
        ]
    )


@text.register
def _life(life: TrajectoryLife) -> str:
    moments = [
        ("-" if moment.ago_s is None else f"{moment.ago_s:.1f} s ago", moment.what, moment.detail or "-")
        for moment in life.moments
    ]
    facts = [f"{life.ticket}: {life.state}"]
    facts += [f"{name} {value}" for name, value in (("group", life.group), ("task", life.task)) if value is not None]
    facts += [f"{name} {value}" for name, value in (("stream", life.stream), ("host", life.host)) if value]
    return "\n".join(
        [", ".join(facts), table(("when", "what", ""), moments, nothing="nothing is known of it"), life.why]
    )


@text.register
def _versions(answer: Versions) -> str:
    weights = answer.weights
    ordered = "none yet" if weights.ordered is None else str(weights.ordered)
    rows = [
        (r.engine, r.version, r.tensors, size(r.bytes), f"{r.canary_nats:.2g}", seconds(r.swap_s), f"{r.age_s:.0f} s")
        for r in weights.proven
    ]
    head = ("engine", "proven", "tensors", "size", "canary off by", "swap", "ago")
    lines = [
        f"learner at version {answer.learner}, alpha {answer.alpha}; engines are brought to version {ordered}",
        table(head, rows, nothing="no engine has proven a version yet"),
    ]
    lines += [f"refused: {one.engine}, version {one.version}, {one.reason}" for one in weights.refusals]
    return "\n".join(lines)


@text.register
def _shards(answer: Shards) -> str:
    rows = [
        (
            shard.name,
            one.operation,
            one.calls,
            one.failures,
            seconds(one.seconds / one.calls),
            quantile(one.counts, STORE_BOUNDS_S, 0.99),
            seconds(one.slowest_s),
        )
        for shard in answer.shards
        for one in shard.operations
        if one.calls
    ]
    head = ("shard", "call", "calls", "failed", "mean", "p99", "slowest")
    return f"store {answer.store}\n" + table(head, rows, nothing="nothing was asked of it yet")


@text.register
def _hardware(answer: Hardware) -> str:
    rows = [
        (
            node.node,
            device.host,
            device.id,
            device.hardware_class,
            device.name,
            ", ".join(device.roles) or "-",
            size(device.memory_bytes),
            device.numa_node,
            device.cpus,
            ", ".join(device.nics) or "-",
        )
        for node in answer.nodes
        for device in node.affinity.devices
    ]
    head = ("node", "host", "device", "class", "name", "good for", "memory", "numa", "cpus", "near nics")
    places = [(p.name, p.role, p.device, p.hardware_class, p.threads) for p in answer.places]
    findings = [
        f"{node.node}: {finding.severity}: {', '.join(finding.subjects)}: {finding.detail}"
        for node in answer.nodes
        for finding in node.affinity.findings
    ]
    return "\n".join(
        [
            table(head, rows, nothing="no devices"),
            "",
            table(("process", "role", "device", "class", "threads"), places, nothing="no processes are placed"),
            *(["", *findings] if findings else []),
            *(["", *costs_of(answer.costs)] if answer.costs is not None else []),
        ]
    )


def costs_of(costs: CostsState) -> list[str]:
    """What each class reaches, what each task is like, and who ordered which mapping."""
    state = costs.state
    classes = [
        (name, f"{reached.compute:.2g}", f"{reached.bandwidth:.2g}", fit.reports, f"{100 * fit.spread:.0f}%")
        for name, fit in state.classes.items()
        if (reached := fit.reached())
    ]
    tasks = [
        (
            name,
            f"{task.turns:.1f}",
            f"{task.prompt:.0f}",
            f"{task.observation:.0f}",
            f"{task.response:.1f}",
            task.responses,
            describe({name: costs.shares[name]}).partition(" to ")[2] if name in costs.shares else "as declared",
        )
        for name, task in sorted(state.tasks.items())
    ]
    orders = [
        f"mapping {one.number} ({one.by}, {costs.now_s - one.at_s:.0f} s ago): {describe(one.after)}: {one.why}"
        for one in costs.orders[-SHOWN_ORDERS:]
    ]
    return [
        table(("class", "of peak FLOP/s", "of bandwidth", "reports", "off by"), classes, nothing="nothing is measured"),
        "",
        table(
            ("task", "turns", "prompt", "observation", "response", "answers", "goes to"),
            tasks,
            nothing="no requests yet",
        ),
        *orders,
    ]


@text.register
def _exposition(answer: MetricsText) -> str:
    return answer.text.rstrip("\n")


@text.register
def _followed(step: Followed) -> str:
    now = step.now
    version = "-" if now.initiating_version is None else str(now.initiating_version)
    lines = [f"  {who:>11}: {words!r}" for who, words in step.said]
    if step.outcome is None:
        lines.append(f"{now.seconds:8.2f} s  {now.ticket}  turn {now.turns}  version {version}  waits for {now.state}")
        return "\n".join(lines)
    outcome = step.outcome
    why = f": {outcome.reason} {outcome.detail}".rstrip() if outcome.state == "lost" else f", reward {outcome.reward:g}"
    lines.append(f"{now.seconds:8.2f} s  {now.ticket}  {outcome.state}{why}, {outcome.turns} turns")
    return "\n".join(lines)


@text.register
def _audit(answer: Audit) -> str:
    rows = [
        (line.time, line.by, line.key or "-", line.order, line.before or "-", line.after or "-", line.result)
        for line in answer.lines
    ]
    return table(
        ("time", "by", "key", "order", "before", "after", "result"), rows, nothing="nobody has ordered anything"
    )


@text.register
def _helps(answer: Helps) -> str:
    if len(answer.commands) == 1:
        one = answer.commands[0]
        parts = [one.usage, f"  {one.purpose}", *([f"\n{one.more}"] if one.more else [])]
        return "\n".join([*parts, *([f"\nIt asks first: {one.danger}"] if one.danger else [])])
    return table(("command", "what it does"), [(one.usage, one.purpose) for one in answer.commands], nothing="")
