"""What Mooncake's transfer engine says of lost and repeated transfers in its logs.

Invariant: only lines in the format of its own logging (glog) count, as its sources write them and as users have shown
them; anything else in a file is left aside. Reads at most the last ``MOST_BYTES`` of a file.

Source: mooncake-transfer-engine/src/transport/rdma_transport/worker_pool.cpp, mooncake-store/src/client.cpp, and the
logs in issues 397, 507, 1088 and 1450 of github.com/kvcache-ai/Mooncake::

    E0603 20:16:59.104586 27322 worker_pool.cpp:271] Worker: Process failed for slice (opcode: 1, ...,
        local_nic: mlx5_7, peer_nic: 10.93.81.13:15729@mlx5_0, ..., retry_cnt: 0): transport retry counter exceeded
    W0523 06:50:40.064657   223 client.cpp:450] Transfer incomplete, retrying... (attempt 2/3)
"""

from __future__ import annotations

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
_OVER = re.compile(_GLOG + rb"Failed to complete transfers after (\d+) seconds")

RETRANSMITTED = "transport retry counter exceeded"
NOT_READY = "RNR retry counter exceeded"  # ibv_wc_status_str


class Trouble(msgspec.Struct):
    """What some logs tell."""

    slices: Counter[tuple[str, str, str]] = msgspec.field(default_factory=Counter)  # local, remote card, status
    again: int = 0  # transfers that were begun again
    over: int = 0  # that were given up after a time


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
            "a peer is gone or overloaded, or its network card does not answer; see the slices above, if there are any",
            "see whether the peers run, and look at mtu, loss and interfaces on both hosts",
        )
    examined.note(f"{len(files)} logs: {sum(trouble.slices.values())} slices failed, {trouble.again} retries")
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
