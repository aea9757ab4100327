"""How busy the hosts of a run are, each asked once for all processes on it.

Invariant: whoever asks has an answer within ``ANSWER_S``, whatever hangs. All nodes of a host that joined are asked at
the same time, and the answer of any will do: one that hangs does not hide its host. A host of which nobody answers is
in the answer, without figures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from actors.core import Node, Ref
from bus.message import BusError, NodeAddress
from coordinator.messages import MEMBER, GetHostReading, Join
from coordinator.muster import host_of
from hwprobe.host_usage import HostReading, read_host_usage

ANSWER_S = 3.0


async def look_at_hosts(node: Node, joins: Iterable[Join]) -> dict[str, HostReading | None]:
    """By the address at which a host's nodes listen."""
    here = host_of(node.address)
    elsewhere = [join.node for join in joins if host_of(join.node) != here]
    found: dict[str, HostReading | None] = {here: read_host_usage(), **dict.fromkeys(map(host_of, elsewhere))}
    for address, answer in zip(
        elsewhere, await asyncio.gather(*(_ask(node, address) for address in elsewhere)), strict=True
    ):
        found[host_of(address)] = found[host_of(address)] or answer
    return found


async def _ask(node: Node, address: NodeAddress) -> HostReading | None:
    try:
        return await node.ask(Ref(address, MEMBER), GetHostReading(), HostReading, timeout_s=ANSWER_S)
    except BusError:
        return None
