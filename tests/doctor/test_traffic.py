"""What is really lost while the doctor looks: in queues that nobody empties or that are too short, and on the way."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from hwprobe.doctor import Examined, Finding, traffic
from hwprobe.doctor.findings import Fix
from tests.doctor.cards import Card, Host, cards, why_not
from tests.support.machines import Machine
from tests.support.namespaces import End, Line, within

ROOT = Path(__file__).resolve().parents[2]
OWN = Path("/proc/thread-self")  # of the namespace that a thread has entered
SO_SNDBUFFORCE, ETH_P_ALL = 32, 3
SMALLEST_MTU = 68  # RFC 791

BURST = """
import socket, sys
import msgspec
from hwprobe.doctor import traffic

def burst():
    frame = bytes(12) + b"\\x88\\xb5" + bytes(46)  # of a protocol for experiments (IEEE 802)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sender:
        sender.bind(("eth0", 0))
        for _ in range(int(sys.argv[1])):
            sender.send(frame)

sys.stdout.buffer.write(msgspec.json.encode(traffic.look(meanwhile=burst).findings))
"""


@pytest.fixture
def host() -> Iterator[Host]:
    if why := why_not():
        pytest.skip(why)
    with cards(Card("eth0")) as made:
        yield made


def burst(host: Host, frames: int) -> list[Finding]:
    """What is found while so many frames are sent, and nobody takes them out of the card's queue."""
    words = ["ip", "netns", "exec", host.name, sys.executable, "-c", BURST, str(frames)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    found = msgspec.json.decode(done.stdout, type=list[Finding])
    return [finding for finding in found if finding.subject != "softnet"]  # of all namespaces together


def test_a_queue_that_nobody_empties_is_found_and_the_remedy_carries_the_burst(host: Host) -> None:
    ip = ["ip", "-n", host.name]
    subprocess.run([*ip, "link", "set", "dev", "eth0", "txqueuelen", "500"], check=True)
    assert burst(host, 100) == []
    (finding,) = burst(host, 1000)
    assert (finding.severity, finding.subject) == ("warning", "eth0")
    assert 600 <= int(finding.evidence.split()[0]) <= 620  # and what IPv6 sends by itself
    assert finding.evidence.endswith("0 were sent; its queue has 500 places")
    remedy = "ip link set dev eth0 txqueuelen 10000"
    assert finding.remedy.startswith(remedy)
    subprocess.run([*ip, *remedy.split()[1:]], check=True)
    assert burst(host, 1000) == []


def test_a_processor_that_has_to_take_in_too_many_frames_is_found(pair: tuple[Machine, Machine]) -> None:
    """One datagram of 65,000 bytes is 1355 frames of 68, and a processor's queue has room for 1000. Whoever takes them
    in is slow: each goes to 200 sockets."""
    one, other = pair
    processors = os.sched_getaffinity(0)
    sends, takes = min(processors), max(processors)
    subprocess.run(["ip", "-n", one.name, "link", "set", "eth0", "mtu", str(SMALLEST_MTU)], check=True)
    with handed_to(takes, other), listening(other, sockets=200):

        def send() -> None:
            os.sched_setaffinity(0, {sends})  # of this thread
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 64 << 20)
                before, until = traffic.count().overflown, time.monotonic() + 20
                while traffic.count().overflown - before < 100 and time.monotonic() < until:
                    sender.sendto(bytes(65_000), (other.address, 9))

        examined = traffic.look(meanwhile=lambda: within(one.name, send))
    (finding,) = [finding for finding in examined.findings if finding.subject == "softnet"]
    assert int(finding.evidence.split()[0]) >= 100
    places = Path("/proc/sys/net/core/netdev_max_backlog").read_text().strip()
    assert finding.evidence.endswith(f"was full ({places} places)")
    assert finding.fix == Fix("net/core/netdev_max_backlog", places, "16384")
    assert finding.remedy.startswith("sysctl -w net.core.netdev_max_backlog='16384', or spread them")


@contextmanager
def handed_to(processor: int, machine: Machine) -> Iterator[None]:
    """What arrives at a machine is taken in by that processor."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs a second processor: one that sends, one that takes in")
    mask = "echo {:x} > /sys/class/net/eth0/queues/rx-0/rps_cpus"
    done = subprocess.run(machine.words(["sh", "-c", mask.format(1 << processor)]), capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"frames cannot be handed to a processor here: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(machine.words(["sh", "-c", mask.format(0)]), check=True)


@contextmanager
def listening(machine: Machine, sockets: int) -> Iterator[None]:
    """Each gets a copy of every frame, until its buffer is full."""
    with ExitStack() as opened:
        for _ in range(sockets):
            opened.enter_context(within(machine.name, _taps_all))
        yield


def _taps_all() -> socket.socket:
    return socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))


@contextmanager
def transfer(sender: str, receiver: str, address: str) -> Iterator[None]:
    """TCP as fast as it goes, from one namespace to the other."""
    over = threading.Event()

    def receive() -> None:
        with server.accept()[0] as connection:
            while connection.recv(1 << 16):
                pass

    def send() -> None:
        with within(sender, socket.socket) as connection:
            connection.connect((address, server.getsockname()[1]))
            while not over.is_set():
                connection.sendall(bytes(1 << 14))

    with within(receiver, lambda: socket.create_server((address, 0))) as server:
        threads = [threading.Thread(target=work, daemon=True) for work in (receive, send)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join(30)


def look(namespace: str) -> Examined:
    return within(namespace, lambda: traffic.look(proc=OWN))


def sent_again(examined: Examined) -> list[Finding]:
    return [finding for finding in examined.findings if finding.subject == "TCP"]


def test_packets_that_are_lost_on_the_way_are_sent_again_and_found(damaged: tuple[End, End, Line]) -> None:
    one, other, line = damaged
    line.drop_every = 10
    with transfer(one.name, other.name, other.address):
        examined = look(one.name)
    (finding,) = sent_again(examined)
    assert finding.severity == "warning"
    again, sent = int(finding.evidence.split()[0]), int(finding.evidence.split("beside ")[1].split()[0])
    assert again >= 0.04 * sent  # one of ten is lost, be it data or its receipt
    assert "retrans" in finding.remedy


def test_traffic_over_a_healthy_way_is_no_finding(pair: tuple[Machine, Machine]) -> None:
    one, other = pair
    with transfer(one.name, other.name, other.address):
        examined = look(one.name)
    assert sent_again(examined) == []
    segments = int(next(note for note in examined.notes if "TCP" in note).split(": ")[1].split()[0])
    assert segments > 10


def test_a_host_that_sends_nothing_is_healthy(pair: tuple[Machine, Machine]) -> None:
    examined = within(pair[0].name, lambda: traffic.look(proc=OWN, meanwhile=lambda: None))
    assert sent_again(examined) == []
    assert examined.notes[-1].endswith(" 0 TCP segments sent, 0 again")
