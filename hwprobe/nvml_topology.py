"""The ways between the GPUs of a host: NVLink, PCIe, and whether one may read the other's memory.

Invariant: symmetrical: every pair is asked for once. GPUs that hang on switches all reach each other (one NVSwitch
fabric a host).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import msgspec

from hwprobe.gpu import Gpu, GpuPath, PathLevel
from hwprobe.nvml_device import Found
from hwprobe.nvml_session import Lost, Session

_LEVELS: dict[int, PathLevel] = {0: "INT", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
READ = 0  # nvmlGpuP2PCapsIndex_t; the bindings' own constant is a tuple by mistake

# nvmlGpuP2PStatus_t
_REFUSED = {
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the two are on different I/O hubs",
    4: "disabled in the driver's registry",
    5: "not supported",
}

Ways = dict[tuple[int, int], GpuPath]
"""(index, other index), the lower first -> what the driver says; ``peer`` is the other."""


def read_ways(session: Session, found: Sequence[Found], ways: Ways) -> None:
    """Fill ``ways``, pair by pair, so that a call that hangs costs only what comes after it."""
    gone: set[int] = set()
    for one, other in combinations(found, 2):
        pair = (one.gpu.index, other.gpu.index)
        if gone & set(pair):
            continue
        session.subject = f"gpu{pair[0]}"
        try:
            level = session.ask("nvmlDeviceGetTopologyCommonAncestor", one.handle, other.handle)
            status = session.ask("nvmlDeviceGetP2PStatus", one.handle, other.handle, READ)
        except Lost as lost:
            session.lost(lost)
            gone.add(pair[0])
            continue
        ways[pair] = GpuPath(
            peer=pair[1],
            level=_LEVELS.get(level) if level is not None else None,
            p2p=None if status is None else status == 0,
            reason=_REFUSED.get(status, "for an unknown reason") if status else "",
        )


def connect(found: Sequence[Found], ways: Ways) -> list[Gpu]:
    """The GPUs with their peers and paths."""
    by_pci = {one.gpu.pci_bus_id: one.gpu.index for one in found if one.gpu.pci_bus_id is not None}
    switched = {one.gpu.index: one.ends.count(None) for one in found if None in one.ends}
    direct = {one.gpu.index: [by_pci[end] for end in one.ends if end in by_pci] for one in found}

    def links(index: int, peer: int) -> int:
        through_switch = min(switched.get(index, 0), switched.get(peer, 0))
        return max(direct[index].count(peer), through_switch)

    result = []
    for one in found:
        index = one.gpu.index
        paths = []
        for other in found:
            peer = other.gpu.index
            if peer == index:
                continue
            way = ways.get((min(index, peer), max(index, peer)), GpuPath(peer=peer))
            paths.append(msgspec.structs.replace(way, peer=peer, nvlinks=links(index, peer)))
        peers = tuple(sorted(path.peer for path in paths if path.nvlinks))
        result.append(msgspec.structs.replace(one.gpu, nvlink_peers=peers, paths=tuple(paths)))
    return result
