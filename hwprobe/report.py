"""What was found, for a terminal: tables in plain text.

Invariant: a table whose subject this host has not is left out, and a figure that is not known is a dash.
"""

from __future__ import annotations

from collections.abc import Sequence

from hwprobe.affinity import AffinityMap
from hwprobe.gpu import Gpu, PcieLink, Rates
from hwprobe.hardware import Cache, Finding, Hardware, Kernel
from hwprobe.offers import Offer

GIB = 1 << 30

Row = tuple[str, ...]


def describe(hardware: Hardware, affinity: AffinityMap, limits: Sequence[Offer]) -> str:
    """The whole report: the host, its devices, NUMA nodes, interfaces, disks, what can be enforced, what is wrong."""
    tables = [
        _host(hardware),
        _devices(affinity),
        _numa(hardware, affinity),
        _gpus(hardware.gpus),
        _slices(hardware.gpus),
        _topology(hardware),
        _measured(hardware),
        _nics(hardware),
        _disks(hardware),
        _table(
            ("LIMIT", "ENFORCED", "OF WHAT", "BY WHAT, OR WHY NOT"),
            [(one.limit, "yes" if one.enforced else "no", one.what, one.how) for one in limits],
        ),
        [_line(finding) for finding in affinity.findings],
    ]
    return "\n\n".join("\n".join(table) for table in tables if table)


def _host(hardware: Hardware) -> list[str]:
    cpu, memory = hardware.cpu, hardware.memory
    quota = f", quota {cpu.quota:g}" if cpu.quota is not None else ""
    reserved = ", ".join(f"{one.total} of {_size(one.size_bytes)}" for one in memory.huge_pages if one.total)
    pages = f"transparent: {memory.transparent_huge_pages or 'unknown'}; reserved: {reserved or 'none'}"
    return [
        f"Host      {hardware.host}",
        f"CPU       {cpu.model}: {cpu.usable} usable of {cpu.online} (allowed {cpu.allowed}{quota};"
        f" {cpu.physical_cores} cores, {cpu.isa})",
        f"Caches    {', '.join(_cache(one) for one in cpu.caches) or '-'}",
        f"Memory    {_gib(memory.usable_bytes)} usable of {_gib(memory.total_bytes)}; huge pages {pages}",
        f"Kernel    {_kernel(hardware.kernel)}",
        f"cgroup    {hardware.cgroup}: {', '.join(hardware.kernel.controllers) or 'no controllers'}",
        f"Driver    {hardware.driver or 'none'}",
    ]


def _cache(cache: Cache) -> str:
    letter = {"data": "d", "instruction": "i"}.get(cache.kind, "")
    return f"L{cache.level}{letter} {cache.count} x {_size(cache.size_bytes)}"


def _kernel(kernel: Kernel) -> str:
    able = [
        ("BPF", kernel.bpf),
        ("BTF", kernel.btf),
        ("tracefs", kernel.tracefs),
        ("perf events", kernel.perf),
        ("user namespaces", bool(kernel.user_namespaces)),
    ]
    have = ", ".join(name for name, there in able if there)
    lacks = ", ".join(name for name, there in able if not there)
    return f"{kernel.release or 'unknown'}; has {have or 'nothing'}; lacks {lacks or 'nothing'}"


def _devices(affinity: AffinityMap) -> list[str]:
    header = ("DEVICE", "CLASS", "KIND", "BF16", "BANDWIDTH", "RIDGE", "MEMORY", "NUMA", "CPUS", "NICS", "BEST FOR")
    return _table(
        header,
        [
            (
                device.id,
                device.hardware_class,
                device.kind or "-",
                _si(device.peak_bf16_flops, "FLOP/s"),
                _si(device.bandwidth, "B/s"),
                f"{device.ridge:.0f}" if device.ridge is not None else "-",
                _gib(device.memory_bytes),
                _or_dash(device.numa_node),
                device.cpus or "-",
                ",".join(device.nics[:2]) or "-",
                ", ".join(device.roles) + (f" ({device.best_tasks} tasks)" if device.best_tasks else "") or "left out",
            )
            for device in affinity.devices
        ],
    )


def _numa(hardware: Hardware, affinity: AffinityMap) -> list[str]:
    distances = {node.node: " ".join(map(str, node.distances)) for node in hardware.numa}
    rows = [
        (
            str(node.node),
            node.cpus or "-",
            _gib(node.memory_bytes),
            distances.get(node.node) or "-",
            ",".join(node.devices) or "-",
            ",".join(node.nics) or "-",
        )
        for share in affinity.hosts
        for node in share.numa
    ]
    return _table(("NUMA", "CPUS", "MEMORY", "DISTANCES", "DEVICES", "NICS"), rows)


def _gpus(gpus: Sequence[Gpu]) -> list[str]:
    """How each is at this moment."""
    rows = [
        (
            f"gpu{gpu.index}",
            gpu.name,
            _or_dash(gpu.sms),
            gpu.compute_capability or "-",
            _of(gpu.clocks.sm_hz, gpu.clocks.sm_max_hz, 1e6, "MHz"),
            _of(gpu.power.draw_w, gpu.power.limit_w, 1, "W"),
            f"{gpu.temperature_c} C" if gpu.temperature_c is not None else "-",
            _ecc(gpu),
            _pcie(gpu.pcie),
            ", ".join(gpu.throttled_by or ()) or "-",
            "-" if gpu.processes is None else str(len(gpu.processes)),
        )
        for gpu in gpus
    ]
    header = ("GPU", "NAME", "SMS", "CC", "CLOCK", "POWER", "TEMP", "ECC", "PCIE", "THROTTLED BY", "PROCESSES")
    return _table(header, rows) if rows else []


def _slices(gpus: Sequence[Gpu]) -> list[str]:
    rows = [
        (name, one.profile, _or_dash(one.sms), _gib(one.memory_bytes), one.uuid or "-")
        for gpu in gpus
        for name, one in zip(gpu.devices, gpu.slices, strict=False)
    ]
    return _table(("SLICE", "PROFILE", "SMS", "MEMORY", "UUID"), rows) if rows else []


def _topology(hardware: Hardware) -> list[str]:
    """The ways between GPUs and to interfaces, as ``nvidia-smi topo -m`` writes them; a star: no access to memory."""
    gpus = hardware.gpus
    nics = sorted({path.nic for gpu in gpus for path in gpu.nic_paths})
    if len(gpus) < 2 and not nics:
        return []
    rows = []
    for gpu in gpus:
        to_gpus = {path.peer: path for path in gpu.paths}
        to_nics = {path.nic: path.level for path in gpu.nic_paths}
        row = [f"gpu{gpu.index}"]
        for other in gpus:
            path = to_gpus.get(other.index)
            if other.index == gpu.index:
                row.append("X")
            elif path is None:
                row.append("-")
            else:
                way = f"NV{path.nvlinks}" if path.nvlinks else path.level or "-"
                row.append(way + ("*" if path.p2p is False else ""))
        rows.append((*row, *(to_nics.get(nic, "-") for nic in nics)))
    return _table(("WAY", *(f"gpu{gpu.index}" for gpu in gpus), *nics), rows)


def _measured(hardware: Hardware) -> list[str]:
    found: list[tuple[str, Rates | None]] = [(f"gpu{gpu.index}", gpu.measured) for gpu in hardware.gpus]
    found.append(("cpu", hardware.cpu.measured))
    rows = [
        (name, rates.dtype, _si(rates.flops, "FLOP/s"), _si(rates.bandwidth, "B/s"))
        for name, rates in found
        if rates is not None
    ]
    return _table(("MEASURED", "TYPE", "MATRIX PRODUCT", "COPY"), rows) if rows else []


def _nics(hardware: Hardware) -> list[str]:
    rows = [
        (
            nic.name,
            "up" if nic.up else "down",
            "-" if nic.speed_mbps is None else f"{nic.speed_mbps / 1000:g} Gbit/s",
            _or_dash(nic.mtu),
            _or_dash(nic.numa_node),
            nic.driver or "-",
            f"{nic.rx_queues}/{nic.tx_queues}",
            ",".join(nic.rdma) or "-",
        )
        for nic in hardware.nics
    ]
    return _table(("NIC", "STATE", "SPEED", "MTU", "NUMA", "DRIVER", "QUEUES", "RDMA"), rows) if rows else []


def _disks(hardware: Hardware) -> list[str]:
    kinds = {True: "rotating", False: "solid state", None: "-"}
    rows = [
        (
            disk.name,
            _gib(disk.size_bytes),
            kinds[disk.rotational],
            disk.model or "-",
            _or_dash(disk.numa_node),
            ",".join(disk.mounts) or "-",
        )
        for disk in hardware.disks
    ]
    return _table(("DISK", "SIZE", "KIND", "MODEL", "NUMA", "MOUNTED AT"), rows) if rows else []


def _line(finding: Finding) -> str:
    subjects = f"{', '.join(finding.subjects)}: " if finding.subjects else ""
    remedy = f" ({finding.remedy})" if finding.remedy else ""
    return f"{finding.severity}: {subjects}{finding.detail}{remedy}"


def _table(header: Row, rows: Sequence[Row]) -> list[str]:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]


def _ecc(gpu: Gpu) -> str:
    if gpu.ecc is None:
        return "-"
    return f"on, {gpu.ecc.uncorrected or 0} errors" if gpu.ecc.enabled else "off"


def _pcie(link: PcieLink) -> str:
    if link.generation is None or link.width is None:
        return "-"
    most = f" of {link.max_generation or '?'} x{link.max_width or '?'}"
    return f"{link.generation} x{link.width}{most}"


def _of(value: float | None, most: float | None, unit: float, name: str) -> str:
    if value is None:
        return "-"
    return f"{value / unit:.0f}" + (f" of {most / unit:.0f}" if most is not None else "") + f" {name}"


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.1f} GiB"


def _size(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def _si(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    for factor, prefix in ((1e12, "T"), (1e9, "G")):
        if value >= factor:
            return f"{value / factor:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)
