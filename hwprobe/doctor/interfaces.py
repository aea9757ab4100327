"""Network interfaces: do they lose or damage frames, and are they as fast as they could be.

Invariant: reads only. An interface that is down, slow or without jumbo frames is no finding by itself: laptops have
such. Damaged and overrun frames are, and so is a fast card (``FAST_MBPS``) that sends small frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from hwprobe.doctor.findings import Examined, Unable
from hwprobe.doctor.ring import Ring, read_ring
from hwprobe.sysfs import entries, read_int, read_text

FAST_MBPS = 10_000
"""From here on frames of 1500 bytes cost more than the data, and a window of a few megabytes does not fill the link."""

JUMBO = 9000
LEAST_BAD, BAD_SHARE = 10, 1e-5
"""Frames that must have gone wrong since the start of the host, and which share of all."""

DAMAGED = ("rx_crc_errors", "rx_frame_errors", "rx_length_errors", "rx_errors")
UNSENT = ("tx_errors", "tx_carrier_errors", "tx_aborted_errors", "tx_heartbeat_errors")
OVERRUN = ("rx_missed_errors", "rx_fifo_errors", "rx_over_errors")
ARPHRD_LOOPBACK = 772


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    up: bool
    model: str  # vendor and device; empty for a virtual one
    speed_mbps: int | None
    mtu: int | None
    duplex: str
    frames: int
    counters: dict[str, int]


def look(sysfs: Path = Path("/sys"), ring: Callable[[str], Ring | None] = read_ring) -> Examined:
    """All interfaces but loopback. Raises ``Unable`` without sysfs."""
    interfaces = read_interfaces(sysfs)
    examined = Examined()
    for interface in interfaces:
        if interface.up:
            _frames(interface, ring, examined)
            _pace(interface, interfaces, examined)
        examined.note(_line(interface, ring))
    if not interfaces:
        examined.note("no interface but loopback")
    return examined


def read_interfaces(sysfs: Path = Path("/sys")) -> list[Interface]:
    """Raises ``Unable``."""
    directory = sysfs / "class" / "net"
    if not directory.is_dir():
        raise Unable(f"{directory} is not there: interfaces are read from sysfs")
    paths = [path for path in entries(directory) if path.is_dir() and path.name != "lo"]
    return [_read(path) for path in paths if read_int(path / "type") != ARPHRD_LOOPBACK]


def _read(path: Path) -> Interface:
    counters = {one.name: read_int(one) or 0 for one in entries(path / "statistics")}
    ids = [read_text(path / "device" / name) or "" for name in ("vendor", "device")]
    speed = read_int(path / "speed")
    return Interface(
        name=path.name,
        up=read_text(path / "operstate") in ("up", "unknown"),
        model=":".join(ids) if (path / "device").exists() else "",
        speed_mbps=speed if speed is not None and speed > 0 else None,
        mtu=read_int(path / "mtu"),
        duplex=read_text(path / "duplex") or "",
        frames=counters.get("rx_packets", 0) + counters.get("tx_packets", 0),
        counters=counters,
    )


def fast(interfaces: Sequence[Interface]) -> list[Interface]:
    """Cards (no virtual ones) that are up and at ``FAST_MBPS`` or more."""
    return [one for one in interfaces if one.up and one.model and (one.speed_mbps or 0) >= FAST_MBPS]


def _frames(interface: Interface, ring: Callable[[str], Ring | None], examined: Examined) -> None:
    name = interface.name
    if found := _many(interface, DAMAGED):
        examined.error(
            name,
            f"{found} of {interface.frames} frames",
            "frames arrive damaged: a cable, a transceiver or a port is bad, or both ends disagree on speed and duplex",
            f"reseat or change the cable and the transceiver of {name}, look at the same counters of the switch's "
            f"port, and watch ethtool -S {name}",
        )
    if found := _many(interface, UNSENT):
        examined.error(
            name,
            f"{found} of {interface.frames} frames",
            "frames cannot be sent: the link comes and goes, or the driver resets the card",
            f"look for {name} in dmesg (link down, transmit queue timed out), change the cable, update the driver",
        )
    if found := _many(interface, OVERRUN):
        held = ring(name)
        room = held is not None and held.receive < held.most
        examined.warning(
            name,
            f"{found} of {interface.frames} frames"
            + (f"; the receive ring has {held.receive} of {held.most} descriptors" if held is not None else ""),
            "frames came faster than this host took them in" + (", and its ring is short" if room else ""),
            f"ethtool -G {name} rx {held.most}"
            if held is not None and room
            else f"spread the interrupts of {name} over more cores (ethtool -L {name}), or turn on flow control",
        )


def _many(interface: Interface, names: Sequence[str]) -> str:
    """The counters that are beyond what chance does to a good cable; "" where there are none."""
    counts = {name: interface.counters.get(name, 0) for name in names}
    worst = max(counts.values())  # some drivers count a frame under several
    if worst < LEAST_BAD or worst <= BAD_SHARE * interface.frames:
        return ""
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count)


def _pace(interface: Interface, all_of_them: Sequence[Interface], examined: Examined) -> None:
    name, speed = interface.name, interface.speed_mbps
    if interface.model and interface.duplex == "half":
        examined.warning(
            name,
            f"expected full duplex, found half at {_speed(speed)}",
            "the two ends have not agreed: one of them has its speed fixed by hand",
            f"ethtool -s {name} autoneg on, and the same at the switch",
        )
    twins = [one for one in all_of_them if one.up and one.model == interface.model and one.speed_mbps]
    best = max((one.speed_mbps or 0 for one in twins), default=0)
    if interface.model and speed is not None and speed < best:
        same = next(one.name for one in twins if one.speed_mbps == best)
        examined.warning(
            name,
            f"{_speed(speed)}, while {same}, the same card, runs at {_speed(best)}",
            "the link came up slower than the card can: a cable or a transceiver of a lower class, or a port set lower",
            f"compare ethtool {name} with ethtool {same}: supported, advertised and link partner advertised modes",
        )
    if interface in fast([interface]) and (interface.mtu or JUMBO) < JUMBO:
        examined.warning(
            name,
            f"expected an MTU of {JUMBO} at {_speed(speed)}, found {interface.mtu}",
            "small frames cost a fast link much of its speed",
            f"ip link set dev {name} mtu {JUMBO}, on every host and on the switches between them; then look again "
            "with --peer, which tests the way",
        )


def _line(interface: Interface, ring: Callable[[str], Ring | None]) -> str:
    held = ring(interface.name) if interface.up else None
    parts = [
        "up" if interface.up else "down",
        _speed(interface.speed_mbps),
        f"MTU {interface.mtu}",
        *([f"ring {held.receive} of {held.most}"] if held is not None and held.most else []),
    ]
    return f"{interface.name}: {', '.join(parts)}"


def _speed(mbps: int | None) -> str:
    return "speed unknown" if mbps is None else f"{mbps / 1000:g} Gbit/s"
