"""What Mooncake's transfer engine says in its logs of transfers that failed, were begun again or stood still.

Invariant: only lines in the format of its own logging (glog) count, as its sources write them, as users have shown
them, or as a real engine has written them here; anything else in a file is left aside. Reads at most the last
``MOST_BYTES`` of a file.

Over RDMA (source: mooncake-transfer-engine/src/transport/rdma_transport/worker_pool.cpp, mooncake-store/src/client.cpp,
and the logs in issues 397, 507, 1088 and 1450 of github.com/kvcache-ai/Mooncake)::

    E0603 20:16:59.104586 27322 worker_pool.cpp:271] Worker: Process failed for slice (opcode: 1, ...,
        local_nic: mlx5_7, peer_nic: 10.93.81.13:15729@mlx5_0, ..., retry_cnt: 0): transport retry counter exceeded
    W0523 06:50:40.064657   223 client.cpp:450] Transfer incomplete, retrying... (attempt 2/3)

Over TCP (source: version 0.3.13.post1, run between two network namespaces; its logs are in tests/doctor/mooncake)::

    E1130 21:19:49.873610  8753 tcp_transport_lane_impl.h:1088] TCP lane connection to 10.208.176.2:15012 failed:
        Connection refused (attempt failure 1)
    E1130 21:20:49.946399  9051 tcp_transport_session_impl.h:518] ClientSession: no transfer progress within 30s; ...

Packets that are lost on the way it does not see over TCP, where the kernel sends them again: see ``traffic``.
"""

from __future__ import annotations

import errno
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from hwprobe.doctor.findings import Examined, Unable

MOST_BYTES = 64 << 20

_GLOG = rb"^[IWEF](?:\d{4}|\d{8}) \d\d:\d\d:\d\d\.\d+ +\d+ [\w.]+:\d+\] "
_SLICE = re.compile(
    _GLOG + rb"Worker: Process failed for slice \(.*local_nic: ([^,]+), peer_nic: ([^,]+),.*\): (.+?)\s*$"
)
_AGAIN = re.compile(_GLOG + rb"Transfer incomplete, retrying\.\.\. \(attempt (\d+)/(\d+)\)")
_OVER = re.compile(
    _GLOG + rb"(?:Failed to complete transfers after \d+ seconds|Sync batch data transfer timeout after \d+ns)"
)
_LANE = re.compile(_GLOG + rb"TCP lane connection to (\S+) failed: (.+?) \(attempt failure (\d+)\)")
_STILL = re.compile(_GLOG + rb"ClientSession: no (transfer progress|status frame) within (\d+)s")
_BROKEN = re.compile(_GLOG + rb"ClientSession(?:: failed to read|::\w+ failed).* Error: (.+?)\.? \(value: (\d+)\)")
_OWN_DOING = errno.ECANCELED  # the engine closes a connection by itself that stands still

RETRANSMITTED = "transport retry counter exceeded"
NOT_READY = "RNR retry counter exceeded"  # ibv_wc_status_str


class Lane(msgspec.Struct):
    """Connections over TCP that could not be made."""

    failed: int  # the engine counts them, and tells of every first, second, fourth, eighth, ...
    last: str


class Trouble(msgspec.Struct):
    """What some logs tell."""

    slices: Counter[tuple[str, str, str]] = msgspec.field(default_factory=Counter)  # local, remote card, status
    again: int = 0  # transfers that were begun again
    over: int = 0  # that were given up after a time
    lanes: dict[str, Lane] = msgspec.field(default_factory=dict)  # by the peer's address and port
    still: Counter[tuple[str, int]] = msgspec.field(default_factory=Counter)  # what did not come, within how long
    broken: Counter[str] = msgspec.field(default_factory=Counter)  # connections that ended early, by error


def look(files: Sequence[Path]) -> Examined:
    """Raises ``Unable`` where there is no log to read."""
    if not files:
        raise Unable("no log of Mooncake was named (--mooncake-log FILE), and the run has none")
    trouble = read(files)
    examined = Examined()
    for (local, remote, status), count in trouble.slices.most_common():
        _judge(local, remote, status, count, examined)
    if trouble.again or trouble.over:
        examined.warning(
            "transfers",
            f"{trouble.again} were begun again, {trouble.over} given up after their time",
            "a peer is gone or overloaded, or its network card does not answer; see what else is found, if anything is",
            "see whether the peers run, and look at mtu, loss and interfaces on both hosts",
        )
    _judge_tcp(trouble, examined)
    failed = sum(trouble.slices.values())
    examined.note(
        f"{len(files)} {'log' if len(files) == 1 else 'logs'}: {failed} slices failed, {trouble.again} retries"
    )
    return examined


def read(files: Iterable[Path]) -> Trouble:
    """Raises ``OSError``."""
    trouble = Trouble()
    for path in files:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MOST_BYTES))
            for line in file:
                _count(line, trouble)
    return trouble


def _count(line: bytes, trouble: Trouble) -> None:
    if (found := _SLICE.match(line)) is not None:
        local, remote, status = (part.decode(errors="replace") for part in found.groups())
        trouble.slices[local, _card(remote), status] += 1
    elif _AGAIN.match(line) is not None:
        trouble.again += 1
    elif _OVER.match(line) is not None:
        trouble.over += 1
    else:
        _count_tcp(line, trouble)


def _count_tcp(line: bytes, trouble: Trouble) -> None:
    if (found := _LANE.match(line)) is not None:
        peer, why = (part.decode(errors="replace") for part in found.groups()[:2])
        trouble.lanes[peer] = Lane(int(found[3]), why)
    elif (found := _STILL.match(line)) is not None:
        trouble.still[found[1].decode(), int(found[2])] += 1
    elif (found := _BROKEN.match(line)) is not None and int(found[2]) != _OWN_DOING:
        trouble.broken[found[1].decode(errors="replace")] += 1


def _judge_tcp(trouble: Trouble, examined: Examined) -> None:
    for peer, lane in trouble.lanes.items():
        examined.error(
            peer,
            f"{lane.failed} connections to {peer} failed, the last: {lane.last}",
            "the process of that peer has ended (a new one has another port), or a firewall is in the way",
            f"see whether it runs, and look with reach (--peer tcp://{peer})",
        )
    if trouble.still:
        (_, within_s), _ = trouble.still.most_common(1)[0]
        examined.error(
            "TCP connections",
            f"{max(trouble.still.values())} stood still for {within_s} s and were closed",
            "the way to the peer carries nothing, or only small packets (a link that is down, loss, an MTU), or the "
            "peer's process hangs",
            "look at loss, mtu and traffic on both hosts, and at what the peer's process does (bin/trace stacks)",
        )
    if trouble.broken:
        examined.warning(
            "TCP connections",
            f"{sum(trouble.broken.values())} ended within a transfer: {', '.join(trouble.broken)}",
            "the peer's process has ended, or was started again",
            "look at the peer's log and, for a process that was killed, at dmesg (out of memory)",
        )


def _card(peer: str) -> str:
    """``10.93.81.13:15729@mlx5_0`` -> ``10.93.81.13@mlx5_0``: ports change with every process."""
    host, at, card = peer.partition("@")
    return f"{host.rpartition(':')[0] or host}{at}{card}"


def _judge(local: str, remote: str, status: str, count: int, examined: Examined) -> None:
    evidence = f"{count} slices failed from {local} to {remote}: {status}"
    if status == RETRANSMITTED:
        examined.error(
            f"{local} -> {remote}",
            evidence,
            "what was sent was repeated until the card gave up: packets are lost on the way, the peer's process is "
            "gone, or the two cards have no way to each other (another rail, MTU or GID)",
            "look at the cards' counters on both hosts, at MC_GID_INDEX and MC_MTU, and whether each card reaches each "
            "(ib_send_bw); on RoCE, whether flow control (PFC) is on from end to end",
        )
    elif status == NOT_READY:
        examined.error(
            f"{local} -> {remote}",
            evidence,
            "the receiver had no buffer ready again and again: it is overloaded or hangs",
            f"look at the process behind {remote}",
        )
    else:
        examined.warning(
            f"{local} -> {remote}",
            evidence,
            "the card refused the transfer",
            "the peer's memory may have been let go (it restarted), or registered with other rights; look at its log",
        )
