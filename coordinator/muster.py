"""Which node has which role when a run gathers again after a loss: a pure function of who is there.

Invariants:

- whoever is there keeps its roles, unless its host is barred (quarantined) or somebody else has the role already;
- every role has a holder, or there is an error that names it; what is missing goes to spares (nodes without a role),
  each role to the fittest by its hardware, and among equally fit ones to a spare that has been given one already, so
  that what shared a host shares one again; where no such node is left, to one that came as a spare and has a role by
  now: of a lost host the first role to be missed may have been given to it at once;
- the same nodes give the same answer.

====================  ==================================================================
role                  fittest
====================  ==================================================================
trainer               enough GPUs for its ranks; compute-optimised before others; then none
proxy (engines)       the declared class; then bandwidth-optimised, then other GPUs; then none
env, reward, weights  as few GPUs as possible, then most cores
====================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from actors.proxy.routing import preferred_class
from bus.message import BusError, NodeAddress
from coordinator.job import Job
from coordinator.messages import ROLES, SEVERAL, Join, Role
from hwprobe import AffinityMap, decode


class NoHolder(BusError):
    """Nobody is left for a role; the message names it and says who is there."""


class Member(msgspec.Struct, frozen=True):
    """A node that takes part, or would."""

    node: str
    host: str
    roles: tuple[Role, ...]
    affinity: AffinityMap
    spare: bool = False  # came as one


def member_of(join: Join) -> Member:
    return Member(
        join.node.name, host_of(join.node), tuple(join.roles), decode(join.affinity), spare=join.came_as_spare
    )


def host_of(address: NodeAddress) -> str:
    """By which a node's host is known: the address at which it listens, without the port."""
    return address.control.rpartition("//")[2].rpartition(":")[0]


def muster(members: Sequence[Member], barred: Collection[str], job: Job) -> dict[str, list[Role]]:
    """Every node's roles from now on. Raises ``NoHolder``."""
    able = sorted((member for member in members if member.host not in barred), key=lambda member: member.node)
    given: dict[str, list[Role]] = {member.node: [] for member in members}
    held: set[Role] = set()
    for member in able:
        for role in member.roles:
            if role in SEVERAL or role not in held:
                given[member.node].append(role)
                held.add(role)
    for role in ROLES:
        if role not in held:
            given[_spare_for(role, able, given, job, members).node].append(role)
    return given


def _spare_for(
    role: Role, able: Sequence[Member], given: Mapping[str, Sequence[Role]], job: Job, members: Sequence[Member]
) -> Member:
    begun = [name for name, roles in given.items() if roles]
    spare = fittest(role, [member for member in able if not member.roles], job, begun)
    if spare is None:
        spare = fittest(role, [member for member in able if member.spare], job, begun)
    if spare is None:
        there = ", ".join(f"{each.node} ({', '.join(each.roles) or 'spare'})" for each in members) or "nobody"
        raise NoHolder(f"no spare for the role {role}; there are {there}")
    return spare


def fittest(role: Role, spares: Sequence[Member], job: Job, begun: Collection[str] = ()) -> Member | None:
    """The spare to give a role to. ``begun``: nodes that have been given one already."""
    ranked = [(_fitness(role, spare.affinity, job), spare.node not in begun, spare.node, spare) for spare in spares]
    able = [each for each in ranked if each[0] is not None]
    return min(able, key=lambda each: each[:3], default=(None, None, None, None))[3]


def _fitness(role: Role, affinity: AffinityMap, job: Job) -> tuple[int, int] | None:
    """Less is fitter; None: it cannot have it."""
    gpus = affinity.gpus
    if role == "trainer":
        if not gpus:
            return 2, 0
        if len(gpus) < job.train.ranks:
            return None
        return (0 if any(gpu.kind == "compute" for gpu in gpus) else 1), 0
    if role == "proxy":
        declared = preferred_class(job.rollout.affinity, job.environment.name)
        if declared is not None and any(device.hardware_class == declared for device in affinity.devices):
            return 0, 0
        return (3 if not gpus else 1 if any(gpu.kind == "bandwidth" for gpu in gpus) else 2), 0
    return len(gpus), -affinity.cores
