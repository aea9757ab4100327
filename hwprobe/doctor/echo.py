"""Echo requests (ICMP) of any size with the "don't fragment" bit set: what the way to a host carries, and how fast.

Invariant: what was sent is one IP packet of exactly the size that is asked for, or nothing; an answer counts only with
the same number and the same random bytes. A connection's own finding of the path's MTU is left aside, so that a router
that drops large packets without a word is seen.

Source: RFC 792 (echo), RFC 1191 (path MTU), ip(7) (IP_MTU_DISCOVER).
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from hwprobe.doctor.findings import Unable

HEADERS = 28  # IP without options, ICMP
IP_MTU_DISCOVER, IP_PMTUDISC_PROBE = 10, 3
ECHO_REPLY, ECHO_REQUEST = 0, 8
_TOKEN = 8


class TooLarge(Exception):
    """This host, or a router that says so, does not let a packet of that size pass."""


class Burst(msgspec.Struct, frozen=True):
    """What became of several echoes."""

    sent: int
    times_s: list[float]  # of those that came back, in order of arrival

    @property
    def lost(self) -> int:
        return self.sent - len(self.times_s)


class Echo:
    """To one address; use as a context manager. Raises ``Unable`` where this process may not send any."""

    def __init__(self, address: str) -> None:
        self._token = os.urandom(_TOKEN)
        self._number = 0
        self._socket, self._raw = _open()
        self._socket.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        try:
            self._socket.connect((address, 0))
        except OSError as error:
            self._socket.close()
            raise Unable(f"{address}: no way leads there from this host: {error.strerror}") from None

    def __enter__(self) -> Echo:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()

    def passes(self, size: int, *, tries: int, timeout_s: float) -> bool:
        """Whether a packet of this size comes back; one is enough."""
        for _ in range(tries):
            try:
                number = self._send(size)
            except TooLarge:
                return False
            if self._wait({number: time.monotonic()}, timeout_s, most=1):
                return True
        return False

    def largest(self, sizes: Sequence[int], *, tries: int, timeout_s: float) -> int:
        """Of packets sent at once, the size of the largest that comes back; 0 where none does. What is larger than one
        that came back is tried again."""
        best = 0
        for _ in range(tries):
            numbers: dict[int, int] = {}
            for size in sorted(sizes, reverse=True):
                if size > best:
                    with suppress(TooLarge):
                        numbers[self._send(size)] = size
            waiting = dict.fromkeys(numbers, time.monotonic())
            self._wait(waiting, timeout_s, most=len(numbers))
            best = max([best, *(size for number, size in numbers.items() if number not in waiting)])
            if best == max(sizes):
                break
        return best

    def burst(self, count: int, *, every_s: float, size: int, timeout_s: float) -> Burst:
        """Several, and how long each took; for the last ones it waits ``timeout_s``."""
        waiting: dict[int, float] = {}
        times: list[float] = []
        for _ in range(count):
            try:
                number = self._send(size)
            except (TooLarge, OSError):  # a full queue loses a packet, too
                waiting[self._number] = time.monotonic()
                continue
            waiting[number] = time.monotonic()
            times += self._wait(waiting, every_s, most=None)
        times += self._wait(waiting, timeout_s, most=len(waiting))
        return Burst(count, times)

    def _send(self, size: int) -> int:
        """Raises ``TooLarge``."""
        self._number += 1
        number = self._number & 0xFFFF
        payload = self._token + bytes(max(0, size - HEADERS - _TOKEN))
        head = struct.pack("!BBHHH", ECHO_REQUEST, 0, 0, os.getpid() & 0xFFFF, number)
        checked = struct.pack("!BBHHH", ECHO_REQUEST, 0, checksum(head + payload), os.getpid() & 0xFFFF, number)
        try:
            self._socket.send(checked + payload)
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                raise TooLarge from None
            if error.errno not in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNREFUSED, errno.ENOBUFS):
                raise
        return number

    def _wait(self, waiting: dict[int, float], timeout_s: float, most: int | None) -> list[float]:
        """Answers to what waits, until so many have come or the time is over."""
        times: list[float] = []
        until = time.monotonic() + timeout_s
        while (left := until - time.monotonic()) > 0 and (most is None or len(times) < most):
            if not select.select([self._socket], [], [], left)[0]:
                break
            try:
                packet = self._socket.recv(1 << 16)
            except OSError:  # a router's word: too large, or no way
                continue
            sent = waiting.pop(self._answered(packet), None)
            if sent is not None:
                times.append(time.monotonic() - sent)
        return times

    def _answered(self, packet: bytes) -> int:
        """The number of the request that this answers; -1 for what is none of ours."""
        message = packet[(packet[0] & 0xF) * 4 :] if self._raw and packet else packet
        if len(message) < 8 + _TOKEN or message[0] != ECHO_REPLY or message[8 : 8 + _TOKEN] != self._token:
            return -1
        return int(struct.unpack("!H", message[6:8])[0])


def _open() -> tuple[socket.socket, bool]:
    """A socket, and whether what it receives begins with an IP header."""
    for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            return socket.socket(socket.AF_INET, kind, socket.IPPROTO_ICMP), kind == socket.SOCK_RAW
        except PermissionError:
            continue
    raise Unable("echo requests need root, or this group within net.ipv4.ping_group_range")


def checksum(data: bytes) -> int:
    """The internet's (RFC 1071)."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data[: len(data) // 2 * 2]))
    total += data[-1] << 8 if len(data) % 2 else 0
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return 0xFFFF - total
