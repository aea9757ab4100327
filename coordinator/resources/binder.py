"""Binds the child processes of this node as they start: to CPUs near their device, and into control groups.

Invariant: a binding that could not be made never keeps a process from running; it is said once, with the reason, and
counted. What is recorded as bound was accepted by the kernel.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from actors.core.process import bind_children
from coordinator.resources.resolve import Place, Placement
from coordinator.resources.settings import BindingSettings, Kind, ShareSettings
from hwprobe import AffinityMap, Device, HostShare
from hwprobe.cpulist import format_cpulist, parse_cpulist
from hwprobe.delegation import Groups, Share
from hwprobe.offers import Offer, offers

log = logging.getLogger(__name__)


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one process."""

    name: str
    pid: int
    cpus: str | None = None  # that it is pinned to
    limits: tuple[str, ...] = ()  # controllers that hold for it
    refused: dict[str, str] = {}  # limit -> why it does not

    def line(self) -> str:
        pinned = f"CPUs {self.cpus}" if self.cpus is not None else "any CPU"
        held = f", limited in {', '.join(self.limits)}" if self.limits else ""
        missing = "".join(f"; {limit} is not limited: {why}" for limit, why in self.refused.items())
        return f"{self.name} (pid {self.pid}): {pinned}{held}{missing}"


class Binder:
    """See the module docstring. ``say`` is told what a job asked for and does not get."""

    def __init__(
        self,
        settings: BindingSettings,
        placement: Placement,
        affinity: AffinityMap,
        *,
        directory: Path,
        say: Callable[[str], None],
        groups: Groups | None = None,
    ) -> None:
        self._settings = settings
        self._places = {place.name: place for place in placement.places}
        self._devices = {device.id: device for device in affinity.devices}
        self._hosts = affinity.hosts
        self._io_path = str(directory)
        self._say = say
        self._groups = groups if groups is not None else Groups()
        self._said: set[str] = set()
        self.bound: dict[str, Bound] = {}
        self.refusals: Counter[str] = Counter()

    def open(self) -> None:
        """From now on every child is bound as it starts; what this host can enforce goes to the log, a line each."""
        for offer in self.offered():
            log.info("%s", offer.line())
        bind_children(self.bind)

    def offered(self) -> tuple[Offer, ...]:
        nodes = sum(len(host.numa) for host in self._hosts)
        cpus = format_cpulist(cpu for host in self._hosts for cpu in parse_cpulist(host.cpus))
        gpus = [None for device in self._devices.values() if device.id != "cpu"]
        return offers(cpus=cpus, numa_nodes=nodes, gpus=gpus)

    def close(self) -> None:
        """Bind no more, and remove the groups of those that have ended."""
        bind_children(None)
        for group in self._groups.close():
            log.info("control group %s still holds processes and stays", group)

    def bind(self, name: str, pid: int) -> None:
        """``name``: of the child, with its node's in front where it has one."""
        place = self._places.get(name.rpartition(".")[2])
        if place is None:  # a tracker, a report
            return
        cpus, unpinned = self._pin(place, pid)
        share = self._share(place)
        refused = dict(self._groups.confine(name, pid, share)) if share.wanted() else {}
        held = tuple(limit for limit in share.wanted() if limit not in refused)
        bound = Bound(name=name, pid=pid, cpus=cpus, limits=held, refused=refused | unpinned)
        self.bound[name] = bound
        log.info("%s", bound.line())
        for limit, why in bound.refused.items():
            self.refusals[limit] += 1
            self._once(f"{limit} of {place.role} is not limited: {why}")

    def _once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _share(self, place: Place) -> Share:
        kind: Kind = place.role
        return self._settings.limits.get(kind, ShareSettings()).share(self._io_path)

    def _pin(self, place: Place, pid: int) -> tuple[str | None, dict[str, str]]:
        """The CPUs that it now runs on; None where it may run on all."""
        device = self._devices.get(place.device)
        host = next((host for host in self._hosts if device is not None and host.host == device.host), None)
        if self._settings.pin == "off" or device is None or host is None or len(host.numa) < 2:
            return None, {}
        cpus = near_cpus(place, device, host)
        try:
            os.sched_setaffinity(pid, parse_cpulist(cpus))
        except (AttributeError, OSError) as error:
            return None, {"pinning": f"CPUs {cpus}: {error}"}
        return cpus, {}


def near_cpus(place: Place, device: Device, host: HostShare) -> str:
    """Of a GPU's process those near the GPU; of others those of one NUMA node, dealt out by number. All that the host
    has, where those would be fewer than its threads."""
    near = device.cpus
    if device.id == "cpu":
        nodes = [node.cpus for node in host.numa if node.cpus]
        number = place.name.rpartition("-")[2]
        near = nodes[int(number) % len(nodes)] if nodes and number.isdecimal() else host.cpus
    return near if len(parse_cpulist(near)) >= place.threads else host.cpus
