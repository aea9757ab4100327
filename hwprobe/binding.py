"""What lies near what on one host: NUMA node <-> CPUs <-> devices <-> NICs.

Invariant: only CPUs that this process may use are ever named, each under exactly one NUMA node.
"""

from __future__ import annotations

from itertools import chain, zip_longest
from typing import Literal

import msgspec

from hwprobe.cpulist import format_cpulist, parse_cpulist
from hwprobe.hardware import Hardware, Nic

NumaPolicy = Literal["balanced", "compact", "off"]


class NumaBinding(msgspec.Struct, frozen=True, kw_only=True):
    """One NUMA node's share of a host."""

    node: int
    cpus: str  # that this process may use; empty where none is
    memory_bytes: int | None
    devices: tuple[str, ...]  # gpu0, ...
    nics: tuple[str, ...]  # up, fastest first


class HostShare(msgspec.Struct, frozen=True, kw_only=True):
    """What this process may use of one host."""

    host: str
    cores: int  # CPUs that can be kept busy; fewer than in ``cpus`` under a CPU quota
    cpus: str
    memory_bytes: int
    numa: tuple[NumaBinding, ...]
    nics: tuple[Nic, ...]

    def nics_near(self, node: int | None) -> tuple[str, ...]:
        """Interfaces of a NUMA node, fastest first; all of the host's where the node is unknown or has none."""
        near = next((binding.nics for binding in self.numa if binding.node == node), ())
        return near or _fastest_first(self.nics)


def bind_host(hardware: Hardware, cores: int, policy: NumaPolicy, *, narrow: bool = False) -> HostShare:
    """Group by NUMA node. ``narrow`` keeps only ``cores`` of the CPUs: evenly from all nodes where ``balanced``, node
    by node where ``compact``, in rising order where ``off`` (then there is one node that holds everything)."""
    allowed = set(parse_cpulist(hardware.cpu.allowed))
    nodes = {node.node: sorted(allowed & set(parse_cpulist(node.cpus))) for node in hardware.numa}
    first = hardware.numa[0].node
    nodes[first] = sorted({*nodes[first], *allowed.difference(*nodes.values())})  # CPUs that no node claims
    if narrow:
        kept = set(_choose(nodes, cores, policy))
        nodes = {node: [cpu for cpu in cpus if cpu in kept] for node, cpus in nodes.items()}
    one = len(hardware.numa) == 1
    bindings = tuple(
        NumaBinding(
            node=node.node,
            cpus=format_cpulist(nodes[node.node]),
            memory_bytes=node.memory_bytes,
            devices=tuple(name for gpu in hardware.gpus if gpu.numa_node == node.node for name in gpu.devices),
            nics=_fastest_first(
                tuple(nic for nic in hardware.nics if nic.numa_node == node.node or (one and nic.numa_node is None))
            ),
        )
        for node in hardware.numa
    )
    if policy == "off":
        bindings = (_merged(bindings, nodes, hardware),)
    return HostShare(
        host=hardware.host,
        cores=cores,
        cpus=format_cpulist(chain.from_iterable(nodes.values())),
        memory_bytes=hardware.memory.usable_bytes,
        numa=bindings,
        nics=hardware.nics,
    )


def _choose(nodes: dict[int, list[int]], cores: int, policy: NumaPolicy) -> list[int]:
    if policy == "balanced":
        order = [cpu for row in zip_longest(*nodes.values()) for cpu in row if cpu is not None]
    elif policy == "compact":
        order = list(chain.from_iterable(nodes.values()))
    else:
        order = sorted(chain.from_iterable(nodes.values()))
    return order[:cores]


def _merged(bindings: tuple[NumaBinding, ...], nodes: dict[int, list[int]], hardware: Hardware) -> NumaBinding:
    sizes = [binding.memory_bytes for binding in bindings if binding.memory_bytes is not None]
    return NumaBinding(
        node=bindings[0].node,
        cpus=format_cpulist(chain.from_iterable(nodes.values())),
        memory_bytes=sum(sizes) if len(sizes) == len(bindings) else None,
        devices=tuple(name for gpu in hardware.gpus for name in gpu.devices),
        nics=_fastest_first(hardware.nics),
    )


def _fastest_first(nics: tuple[Nic, ...]) -> tuple[str, ...]:
    """Interfaces that are up; those with a device before virtual ones, then by speed, then by name."""
    up = [nic for nic in nics if nic.up]
    return tuple(nic.name for nic in sorted(up, key=lambda nic: (nic.virtual, -(nic.speed_mbps or 0), nic.name)))
