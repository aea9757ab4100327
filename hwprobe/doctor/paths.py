"""The way to other hosts: whether it carries whole frames, loses some, and how long it is.

Invariant: what is said of a way was found with real packets that may not be split (``hwprobe.doctor.echo``), never
taken from a setting. Few and small: a test disturbs nobody.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from hwprobe.doctor.echo import Burst, Echo
from hwprobe.doctor.findings import Examined, Unable
from hwprobe.doctor.interfaces import FAST_MBPS, JUMBO
from hwprobe.doctor.peers import Peer, Way, way_to

SMALLEST = 576  # RFC 791: what every host takes
TRIES, ANSWER_S = 3, 1.0
LARGE_TRIES, LARGE_ANSWER_S = 3, 0.3
RUNGS = 16  # sizes that are tried at once
STEP = 4  # bytes; a path MTU is found to within so many
USUAL = (1280, 1400, 1420, 1450, 1460, 1480, 1492, 1500, 4200, 8900, 8950, 9000)
"""MTUs that people set; a switch lets four bytes more pass, for a VLAN's tag."""

ECHOES, EVERY_S, ECHO_BYTES = 50, 0.01, 84
LOST_SOME, LOST_MANY = 2, 5
FAR_S = 0.005
CONNECT_S = 3.0


def look_mtu(peers: Sequence[Peer], sysfs: Path = Path("/sys")) -> Examined:
    """The largest packet that passes, for each peer. Raises ``Unable``."""
    examined = Examined()
    for peer, way in _ways(peers, sysfs):
        if way is None:
            examined.note(f"{peer.address}: no way leads there; see loss")
            continue
        with Echo(peer.address) as echo:
            if not echo.passes(ECHO_BYTES, tries=TRIES, timeout_s=ANSWER_S):
                examined.note(f"{peer.address}: no answer to echo requests; see loss")
                continue
            _judge_mtu(peer, way, largest(echo, way.mtu), examined)
    return examined


def largest(echo: Echo, most: int) -> int:
    """Size of the largest packet, up to ``most``, that comes back; where it is less, to within ``STEP``."""

    low, high = SMALLEST, most  # the first passes, or nothing does
    sizes = [most]
    while True:
        passed = echo.largest(sizes, tries=LARGE_TRIES, timeout_s=LARGE_ANSWER_S)
        if passed == most:
            return most
        low = max(low, passed)
        high = min([high, *(size for size in sizes if size > low)])
        if high - low <= STEP:
            return _usual(echo, low, high)
        sizes = sorted({low + (high - low) * rung // RUNGS for rung in range(1, RUNGS)})


def _usual(echo: Echo, low: int, high: int) -> int:
    """The MTU that somebody has set, where the first size passes and the second does not."""
    for usual in USUAL:
        if low < usual < high and echo.passes(usual, tries=LARGE_TRIES, timeout_s=LARGE_ANSWER_S):
            return usual
    return next((usual for usual in USUAL if low - STEP <= usual <= low), low)


def _judge_mtu(peer: Peer, way: Way, carried: int, examined: Examined) -> None:
    name = way.interface
    if carried < way.mtu:
        examined.error(
            peer.address,
            f"{name} sends packets of up to {way.mtu} bytes, the way to {peer.address} carries {carried} "
            f"(echo requests with DF set)",
            "something between the two hosts, or the other host, has a smaller MTU and drops what is larger: small "
            "messages arrive, and connections stall as soon as they carry much",
            f"ip link set dev {name} mtu {carried} here, or raise the MTU of the other host and of the switches "
            f"between them to {way.mtu}",
        )
    elif way.mtu < JUMBO and (way.speed_mbps or 0) >= FAST_MBPS:
        examined.warning(
            peer.address,
            f"expected an MTU of {JUMBO} at {(way.speed_mbps or 0) / 1000:g} Gbit/s, found {way.mtu} ({name})",
            "small frames cost a fast link much of its speed",
            f"ip link set dev {name} mtu {JUMBO}, on both hosts and on the switches between them; then look again",
        )
    else:
        examined.note(f"{peer.address}: packets of {carried} bytes pass ({name})")


def look_loss(peers: Sequence[Peer], sysfs: Path = Path("/sys")) -> Examined:
    """What small packets meet on the way to each peer, and whether its port can be reached. Raises ``Unable``."""
    examined = Examined()
    for peer, way in _ways(peers, sysfs):
        if way is None:
            examined.error(
                peer.address,
                "no way leads there from this host",
                "there is no route, or its interface is down",
                f"see what ip route get {peer.address} says",
            )
            continue
        with Echo(peer.address) as echo:
            if echo.passes(ECHO_BYTES, tries=TRIES, timeout_s=ANSWER_S):
                burst = echo.burst(ECHOES, every_s=EVERY_S, size=ECHO_BYTES, timeout_s=ANSWER_S)
                _judge_burst(peer, way, burst, examined)
            elif peer.port is None or connected(peer) != "":
                examined.error(
                    peer.address,
                    f"no answer to {TRIES} echo requests within {ANSWER_S:g} s each",
                    "the host is down, not on this network, or a firewall drops what comes from here",
                    f"see whether {peer.address} runs, and what ip route get {peer.address} says, here and there",
                )
            else:
                examined.note(f"{peer.address}: echo requests are filtered; its port answers")
    return examined


def _judge_burst(peer: Peer, way: Way, burst: Burst, examined: Examined) -> None:
    nearest = min(burst.times_s, default=0.0)
    if burst.lost >= LOST_SOME:
        say = examined.error if burst.lost >= LOST_MANY else examined.warning
        say(
            peer.address,
            f"{burst.lost} of {burst.sent} echoes did not come back",
            "packets are lost on the way: a damaged link, a queue that overflows, or a limit on traffic (policer)",
            f"look at the counters of {way.interface} and of the other host's interface (ethtool -S), and at the "
            "switch's; lower what is sent at a time, or raise the limit",
        )
    if burst.times_s and nearest > FAR_S:
        examined.warning(
            peer.address,
            f"the fastest of {len(burst.times_s)} echoes took {1000 * nearest:.1f} ms, expected at most "
            f"{1000 * FAR_S:g} ms between hosts of one cluster",
            "the hosts are far apart, or a relay, a tunnel or a firewall between them holds packets up",
            f"see where the time goes (mtr {peer.address}); keep roles that talk at every turn on hosts that are near",
        )
    elif burst.lost < LOST_SOME:
        examined.note(f"{peer.address}: {burst.sent} echoes, {burst.lost} lost, {1000 * nearest:.2f} ms")


def look_ports(peers: Sequence[Peer]) -> Examined:
    """Whether what should listen at each peer does, and can be reached. Raises ``Unable`` where no peer has a port."""
    named = [peer for peer in peers if peer.port is not None]
    if not named:
        raise Unable("no peer was named with a port (--peer tcp://ADDRESS:PORT)")
    examined = Examined()
    for peer in named:
        if why := connected(peer):
            refused = why == "refused"
            examined.error(
                peer.name,
                "the connection is refused" if refused else f"no connection within {CONNECT_S:g} s ({why})",
                f"nothing listens at port {peer.port} there" if refused else "the host is down, or a firewall drops it",
                f"start what should listen there (bin/doctor --serve --host {peer.address} --port {peer.port}, or the "
                "role)"
                if refused
                else f"let connections from this host to port {peer.port} of {peer.address} pass",
            )
        else:
            examined.note(f"{peer.name}: something listens")
    return examined


def connected(peer: Peer) -> str:
    """Why a connection to its port fails; "" where it does not."""
    try:
        socket.create_connection((peer.address, peer.port or 0), timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _ways(peers: Sequence[Peer], sysfs: Path) -> list[tuple[Peer, Way | None]]:
    """Those on other hosts, each once, and how this one sends to them. Raises ``Unable`` where there are none."""
    found = {peer.address: (peer, way_to(peer, sysfs)) for peer in peers}
    others = [(peer, way) for peer, way in found.values() if way is None or not way.own]
    if not others:
        raise Unable("no other host was named (--peer ADDRESS)")
    return others
