"""Which devices of the cluster a role gets: its preferred pool first, a compatible one rather than waiting.

Invariant: a device computes for one role at a time (CPUs, which every role can share, for all); what was not preferred
is said so, with the reason; nothing is set aside for a role that does not ask, so no pool is partitioned beforehand.

========== ===================================================================
preferred  by
========== ===================================================================
declared   the user: a hardware class for a task (``rollout.affinity``)
best       the map: the pools in which the role stands first, then second, ...
           (train and prefill on compute-, decode on bandwidth-optimised GPUs)
========== ===================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from hwprobe import AffinityMap, Device, Role
from hwprobe.cost import EFFICIENCY, USUAL

GIB = 1 << 30


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that a role asks for."""

    role: Role
    count: int
    declared: str | None = None  # hardware class that the user prefers
    memory_bytes: int = 0  # that one device must have
    hosts: tuple[str, ...] = ()  # only on these; empty is anywhere


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """What a role got from one pool."""

    role: Role
    hardware_class: str
    devices: tuple[str, ...]  # host/id
    preferred: str  # the class that would have been first
    fell_back: bool = False
    reason: str = ""  # why not the preferred class

    def describe(self) -> str:
        what = f"{self.role}: {len(self.devices)} x {self.hardware_class}"
        return f"{what} instead of {self.preferred}: {self.reason}" if self.fell_back else what


class CannotBind(ValueError):
    """No compatible device is left for a role; the message says what was asked for and what there is."""


def bind(needs: Iterable[Need], affinity: AffinityMap, taken: Iterable[str] = ()) -> list[Binding]:
    """Bind each need in order; ``taken``: devices (host/id) in use already. Raises ``CannotBind``."""
    used = set(taken)
    bindings: list[Binding] = []
    for need in needs:
        for binding in _bind_one(need, affinity, used):
            bindings.append(binding)
            used.update(name for name in binding.devices if not name.endswith("/cpu"))
    return bindings


def _bind_one(need: Need, affinity: AffinityMap, used: set[str]) -> list[Binding]:
    pools = preference(need, affinity)
    if not pools:
        raise CannotBind(f"{need.role}: no device of this cluster can do it{_declared(need)}")
    preferred, missing, used = pools[0], need.count, set(used)
    bindings: list[Binding] = []
    for hardware_class in pools:
        if not missing:
            break
        chosen = _free(need, affinity, hardware_class, used)[:missing]
        if hardware_class == "CPU" and chosen:  # one device for all of them
            chosen = [chosen[index % len(chosen)] for index in range(missing)]
        if not chosen:
            continue
        fell_back = hardware_class != preferred
        bindings.append(
            Binding(
                role=need.role,
                hardware_class=hardware_class,
                devices=tuple(chosen),
                preferred=preferred,
                fell_back=fell_back,
                reason=_why_not(need, affinity, preferred, used) if fell_back else "",
            )
        )
        missing -= len(chosen)
        used.update(name for name in chosen if not name.endswith("/cpu"))
    if missing:
        found = ", ".join(f"{name}: {_why_not(need, affinity, name, used)}" for name in pools)
        raise CannotBind(
            f"{need.role}: expected {need.count} devices{_declared(need)}, {missing} are missing ({found})"
        )
    return bindings


def preference(need: Need, affinity: AffinityMap) -> list[str]:
    """Hardware classes that can do it, best first: the declared one, then by the role's rank there, then by what the
    role is bound by (FLOP/s for training and prefill, bytes/s for decoding), as far as the class reaches it."""
    ranks: dict[str, tuple[int, int, float]] = {}
    for device in affinity.devices:
        if need.role in device.roles:
            name = device.hardware_class
            rank = (int(name != need.declared), device.roles.index(need.role), -_strength(need.role, device))
            ranks[name] = min(ranks.get(name, rank), rank)
    classes = sorted(ranks, key=lambda name: (ranks[name], name))
    if need.declared is not None and need.declared not in classes:
        classes.insert(0, need.declared)  # of which there is none: to be named as the reason
    return classes if ranks else []


def _strength(role: Role, device: Device) -> float:
    """What it reaches of what the role is bound by."""
    efficiency = EFFICIENCY.get(device.hardware_class, USUAL)
    if role == "decode":
        return (device.bandwidth or 0.0) * efficiency.bandwidth
    return (device.peak_bf16_flops or 0.0) * efficiency.compute


def _suited(need: Need, affinity: AffinityMap, hardware_class: str) -> list[Device]:
    return [
        device
        for device in affinity.devices
        if device.hardware_class == hardware_class
        and need.role in device.roles
        and (not need.hosts or device.host in need.hosts)
    ]


def _free(need: Need, affinity: AffinityMap, hardware_class: str, used: set[str]) -> list[str]:
    suited = [device for device in _suited(need, affinity, hardware_class) if device.memory_bytes >= need.memory_bytes]
    return [name for device in suited if (name := f"{device.host}/{device.id}") not in used]


def _why_not(need: Need, affinity: AffinityMap, hardware_class: str, used: set[str]) -> str:
    suited = _suited(need, affinity, hardware_class)
    if not suited:
        return f"there is no {hardware_class}" + (f" on {', '.join(need.hosts)}" if need.hosts else "")
    roomy = [device for device in suited if device.memory_bytes >= need.memory_bytes]
    if not roomy:
        most = max(device.memory_bytes for device in suited)
        return f"{need.memory_bytes / GIB:.1f} GiB are needed, a device has {most / GIB:.1f}"
    busy = sum(f"{device.host}/{device.id}" in used for device in roomy)
    return f"{busy} of {len(roomy)} in use"


def _declared(need: Need) -> str:
    return f" (declared: {need.declared})" if need.declared is not None else ""


def fallbacks(bindings: Sequence[Binding]) -> list[str]:
    """One line for people for each binding that is not the preferred one."""
    return [binding.describe() for binding in bindings if binding.fell_back]
