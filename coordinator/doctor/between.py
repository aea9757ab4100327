"""Between two hosts, over the bus itself: how long a message takes, how much goes through, do the clocks agree.

Invariant: what is judged is the best of many tries, so that a busy processor at either end is not taken for a slow
network; what is sent takes a few seconds a peer at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np

from actors.core import Node, Ref
from actors.version import VERSION
from bus.message import BusError, Lane, NodeAddress, ProtocolMismatch
from bus.security import ClusterKey, SecurityError
from coordinator.doctor.nurse import NODE, NURSE, Nurse, Pulse, TakePulse, Weigh
from coordinator.shell.connection import ShellError, open_node
from hwprobe.doctor import Examined, Unable
from hwprobe.doctor.packages import versions
from hwprobe.doctor.paths import connected
from hwprobe.doctor.peers import Peer, way_to

ANSWER_S = 10.0
ROUNDS = 30
LOOK_S = 3.0  # at most, for one that is fast: two busy hosts take long over most
FAR_S = 0.005

PIECE_BYTES = 1 << 20
WEIGH_S, WEIGH_BYTES = 1.0, 64 << 20
LONGEST_S = 5.0  # where it is slow: two busy hosts are, for a while
LEAST_BYTES_S = 12.5e6
"""100 Mbit/s; of a slower link the half."""

SKEW_S = 0.1
"""Spans, logs and audit lines of several hosts are put in order by their clocks."""

Look = Callable[[Node, "Other", Examined], Awaitable[None]]


class Other(msgspec.Struct, frozen=True):
    """The peer, and who answers there."""

    peer: Peer
    nurse: Ref[Nurse]


def look(peers: Sequence[Peer], key: ClusterKey | None, what: Look) -> Examined:
    """Ask every peer that has a port. Raises ``Unable``."""
    named = [peer for peer in peers if peer.port is not None]
    if not named:
        raise Unable("no peer was named with a port (bin/doctor --serve there, --peer tcp://ADDRESS:PORT here)")
    return asyncio.run(_look(named, key, what))


async def _look(peers: Sequence[Peer], key: ClusterKey | None, what: Look) -> Examined:
    examined = Examined()
    for peer in peers:
        if await asyncio.to_thread(connected, peer):
            examined.note(f"{peer.name}: not reached; see reach")
            continue
        address = f"tcp://{peer.address}:{peer.port}"
        try:
            async with open_node(address, key) as node:
                await what(node, Other(peer, Ref(NodeAddress(NODE, address, "", 0), NURSE)), examined)
        except ProtocolMismatch as error:
            examined.error(peer.name, str(error), "the two hosts run different software", "install the same on both")
        except BusError as error:
            examined.error(
                peer.name,
                str(error),
                "something listens there, but it is not the doctor, has another key, or hangs",
                f"bin/doctor --serve --host {peer.address} --port {peer.port} --key-file FILE there, with the same key "
                "file here",
            )
        except (SecurityError, ShellError) as error:
            raise Unable(str(error)) from None
    return examined


async def latency(node: Node, other: Other, examined: Examined) -> None:
    """There and back, idle."""
    times: list[float] = []
    until = time.monotonic() + LOOK_S
    while len(times) < ROUNDS or (min(times) > FAR_S and time.monotonic() < until):
        started = time.monotonic()
        await _pulse(node, other)
        times.append(time.monotonic() - started)
    best, middle = min(times), sorted(times)[len(times) // 2]
    if best > FAR_S:
        examined.warning(
            other.peer.name,
            f"the fastest of {len(times)} messages took {1000 * best:.1f} ms there and back, expected at most "
            f"{1000 * FAR_S:g} ms",
            "the hosts are far apart, or a relay, a tunnel or a firewall between them holds packets up",
            "compare with loss (echoes, which kernels answer): where those are fast, the processors are overloaded",
        )
    else:
        examined.note(f"{other.peer.name}: {1e6 * best:.0f} us at best, {1e6 * middle:.0f} us in the middle")


async def bandwidth(node: Node, other: Other, examined: Examined) -> None:
    """In one direction, from here: by the piece that took least."""
    there = (await _pulse(node, other)).node
    nurse: Ref[Nurse] = Ref(there, NURSE)
    load = np.zeros(PIECE_BYTES, np.uint8)
    least = least_wanted(other.peer)
    best, sent = 0.0, 0
    begun = time.monotonic()
    while _go_on(time.monotonic() - begun, sent, best >= least):
        started = time.monotonic()
        sent += (await node.ask(nurse, Weigh(load), timeout_s=ANSWER_S, lane=Lane.BULK)).size
        best = max(best, PIECE_BYTES / (time.monotonic() - started))
    if best < least:
        examined.warning(
            other.peer.name,
            f"{best / 1e6:.2f} MB/s over the bus at best, expected at least {least / 1e6:.1f} MB/s",
            "something on the way limits what passes (a shaper, a slow or shared link), loses packets, or a window is "
            "short",
            f"look at loss, mtu and windows; measure the link alone (iperf3 -c {other.peer.address})",
        )
    else:
        examined.note(f"{other.peer.name}: {best / 1e6:.0f} MB/s over the bus, one way")


def _go_on(since_s: float, sent: int, enough: bool) -> bool:
    if enough:
        return since_s < WEIGH_S and sent < WEIGH_BYTES
    return since_s < LONGEST_S or sent == 0


def least_wanted(peer: Peer) -> float:
    """Bytes/s."""
    way = way_to(peer)
    if way is None or way.speed_mbps is None:
        return LEAST_BYTES_S
    return min(LEAST_BYTES_S, way.speed_mbps * 1e6 / 8 / 2)


async def clock(node: Node, other: Other, examined: Examined) -> None:
    """By how much the other host's clock is ahead: half of the fastest round is what one cannot know."""
    best = (float("inf"), 0.0)
    for _ in range(ROUNDS):
        before, started = time.time(), time.monotonic()
        pulse = await _pulse(node, other)
        took = time.monotonic() - started
        best = min(best, (took, pulse.at - (before + took / 2)))
    unsure_s, ahead_s = best[0] / 2, best[1]
    if abs(ahead_s) - unsure_s > SKEW_S:
        examined.warning(
            other.peer.name,
            f"its clock is {abs(ahead_s):.3f} s {'ahead of' if ahead_s > 0 else 'behind'} this host's (to within "
            f"{1000 * unsure_s:.1f} ms), expected at most {SKEW_S:g} s",
            "one of the two is not synchronised",
            "timedatectl on both; let them follow the same servers (chronyc sources, systemd-timesyncd)",
        )
    else:
        examined.note(f"{other.peer.name}: {1000 * ahead_s:+.1f} ms, to within {1000 * unsure_s:.1f} ms")


async def software(node: Node, other: Other, examined: Examined) -> None:
    """Whether both run the same."""
    here = {"rollart": VERSION, **versions()}
    there = (await _pulse(node, other)).versions
    both = sorted(here.keys() & there.keys())
    differ = [f"{name} {there[name]} (here {here[name]})" for name in both if here[name] != there[name]]
    if differ:
        examined.warning(
            other.peer.name,
            f"it has {', '.join(differ)}",
            "the two environments were made at different times, or changed by hand",
            "make both from the same requirements (bin/setup)",
        )
    else:
        examined.note(f"{other.peer.name}: the same versions of {len(both)} packages")


async def _pulse(node: Node, other: Other) -> Pulse:
    return await node.ask(other.nurse, TakePulse(), timeout_s=ANSWER_S)
