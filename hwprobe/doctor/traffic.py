"""What is lost of this host's traffic while the doctor looks: frames for which a queue has no room, and segments that
TCP sends again.

Invariant: only what happens within ``WINDOW_S`` counts, so that a bad minute of last month is no finding; nothing is
sent. Frames that arrive and are dropped (``rx_dropped``) are left aside: those that nobody here takes count among them.

Source: Documentation/networking/statistics.rst (tx_dropped); net/core/net-procfs.c (softnet_stat: a line for each
processor, frames processed and dropped first, in hexadecimal); RFC 4022 (tcpOutSegs, tcpRetransSegs).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from hwprobe.doctor.findings import Examined, Fix
from hwprobe.doctor.fixing import command, read_setting
from hwprobe.doctor.interfaces import read_interfaces
from hwprobe.sysfs import read_int, read_text

WINDOW_S = 1.0
LEAST = 10
DROPPED_SHARE = 1e-3
SENT_AGAIN_SHARE = 0.02
"""Beyond what a busy queue does to a stream now and then; at one in fifty a stream loses half of its speed and more."""

BACKLOG = "net/core/netdev_max_backlog"
ROOMY_BACKLOG, ROOMY_QUEUE = 16_384, 10_000


class Counted(msgspec.Struct, frozen=True):
    """Since the start of the host."""

    sent: dict[str, tuple[int, int]]  # interface -> frames sent, frames dropped instead
    taken: int  # frames that the processors' queues (softnet) took
    overflown: int  # and had no room for
    segments: int  # that TCP sent
    again: int  # that it sent again


def pass_by() -> None:
    time.sleep(WINDOW_S)


def look(sysfs: Path = Path("/sys"), proc: Path = Path("/proc"), meanwhile: Callable[[], None] = pass_by) -> Examined:
    """Raises ``Unable`` without sysfs."""
    before, started = count(sysfs, proc), time.monotonic()
    meanwhile()
    after, took = count(sysfs, proc), time.monotonic() - started
    examined = Examined()
    for name in sorted(before.sent.keys() & after.sent.keys()):
        frames, dropped = (now - then for now, then in zip(after.sent[name], before.sent[name], strict=True))
        if _many(dropped, frames + dropped, DROPPED_SHARE):
            lost = f"{dropped} frames were dropped instead of sent within {took:.1f} s (tx_dropped), {frames} were sent"
            _queue_full(name, lost, read_int(sysfs / "class" / "net" / name / "tx_queue_len"), examined)
    overflown = after.overflown - before.overflown
    if _many(overflown, after.taken - before.taken + overflown, DROPPED_SHARE):
        _backlog_full(overflown, took, examined)
    segments, again = after.segments - before.segments, after.again - before.again
    if _many(again, segments, SENT_AGAIN_SHARE):
        examined.warning(
            "TCP",
            f"{again} segments were sent again within {took:.1f} s, beside {segments} that were sent",
            "packets are lost or overtake each other on the way to some host",
            "ss -tin shows which connections do it (retrans); look at that way with --peer ADDRESS (loss, mtu)",
        )
    examined.note(f"within {took:.1f} s: {segments} TCP segments sent, {again} again")
    return examined


def count(sysfs: Path = Path("/sys"), proc: Path = Path("/proc")) -> Counted:
    """Raises ``Unable``."""
    sent = {
        one.name: (one.counters.get("tx_packets", 0), one.counters.get("tx_dropped", 0))
        for one in read_interfaces(sysfs)
    }
    processors = [line.split() for line in (read_text(proc / "net" / "softnet_stat") or "").splitlines()]
    segments, again = _segments(read_text(proc / "net" / "snmp") or "")
    return Counted(
        sent=sent,
        taken=sum(int(words[0], 16) for words in processors),
        overflown=sum(int(words[1], 16) for words in processors),
        segments=segments,
        again=again,
    )


def _segments(snmp: str) -> tuple[int, int]:
    lines = [line.split() for line in snmp.splitlines() if line.startswith("Tcp:")]
    if len(lines) != 2:
        return 0, 0
    figures = dict(zip(*lines, strict=True))
    return int(figures["OutSegs"]), int(figures["RetransSegs"])


def _many(found: int, of: int, share: float) -> bool:
    return found >= LEAST and found > share * of


def _queue_full(name: str, lost: str, length: int | None, examined: Examined) -> None:
    examined.warning(
        name,
        f"{lost}; its queue has {length} places",
        "frames come faster than whoever takes them out of the queue does (a virtual machine or a tunnel's process "
        "that has no processor, a driver that waits for its card)",
        f"ip link set dev {name} txqueuelen {ROOMY_QUEUE} carries bursts; for more, see what takes them"
        if length is not None and length < ROOMY_QUEUE
        else f"see what takes frames from {name}, and send less at a time",
    )


def _backlog_full(overflown: int, took: float, examined: Examined) -> None:
    setting = read_setting(BACKLOG)  # not every network namespace shows it
    room = setting is not None and setting.isdigit() and int(setting) < ROOMY_BACKLOG
    fix = Fix(BACKLOG, setting, str(ROOMY_BACKLOG)) if room and setting is not None else None
    longer = f"{command(fix)}, or" if fix is not None else f"raise {BACKLOG.replace('/', '.')} on the host, or"
    examined.warning(
        "softnet",
        f"{overflown} frames were dropped within {took:.1f} s because a processor's queue of arrived frames was full"
        + (f" ({setting} places)" if setting is not None else ""),
        "one processor has to take in more frames than it can",
        f"{longer} spread them over more processors (ethtool -L, rps_cpus)",
        fix,
    )
