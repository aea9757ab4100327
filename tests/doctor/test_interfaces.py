from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hwprobe.doctor import Examined, Finding, Unable, interfaces
from hwprobe.doctor.ring import Ring, read_ring
from tests.doctor.cards import Card, Host, cards, why_not
from tests.hwprobe.trees import loopback_files, nic_files, write
from tests.support.namespaces import IFF_NO_PI, IFF_TUN, TUN, TUNSETIFF

IFF_VNET_HDR = 0x4000


def no_ring(name: str) -> Ring | None:
    return None


def tree(root: Path, **changes: dict[str, str]) -> Path:
    files = loopback_files()
    for name, more in changes.items():
        files |= nic_files(name, numa=None) | {f"class/net/{name}/{key}": value for key, value in more.items()}
    return write(root, files)


def look(sysfs: Path, ring: Ring | None = None) -> Examined:
    return interfaces.look(sysfs, lambda name: ring)


def test_a_healthy_card_is_a_note(tmp_path: Path) -> None:
    sysfs = tree(tmp_path, eth0={"duplex": "full", "statistics/rx_packets": "1000000", "statistics/rx_crc_errors": "2"})
    examined = look(sysfs, Ring(receive=1024, most=4096))
    assert examined.findings == []
    assert examined.notes == ["eth0: up, 25 Gbit/s, MTU 9000, ring 1024 of 4096"]


def test_a_laptop_without_a_cable_or_jumbo_frames_is_healthy(tmp_path: Path) -> None:
    wired = nic_files("enp3s0", speed="-1", numa=None, up="down") | {"class/net/enp3s0/mtu": "1500"}
    wireless = {"class/net/wlan0/type": "1", "class/net/wlan0/operstate": "up", "class/net/wlan0/mtu": "1500"}
    sysfs = write(tmp_path, loopback_files() | wired | wireless | {"class/net/wlan0/device/vendor": "0x8086"})
    examined = look(sysfs)
    assert examined.findings == []
    assert len(examined.notes) == 2


@pytest.mark.skipif(os.geteuid() != 0 or not TUN.exists(), reason="a TUN device needs root")
def test_frames_that_really_arrive_damaged_are_found() -> None:
    name = f"rlbad{os.getpid() % 100_000}"
    descriptor = os.open(TUN, os.O_RDWR)
    try:
        flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        subprocess.run(["ip", "link", "set", name, "up"], check=True)
        assert not [one for one in interfaces.look().findings if one.subject == name]
        broken = struct.pack("=BBHHHH", 0, 0x7E, 0, 1, 0, 0) + b"\x45" + bytes(63)  # there is no such segmentation
        for _ in range(interfaces.LEAST_BAD):
            with suppress(OSError):  # refused, and counted
                os.write(descriptor, broken)
        (finding,) = [one for one in interfaces.look().findings if one.subject == name]
    finally:
        os.close(descriptor)
    assert finding.severity == "error"
    assert "rx_frame_errors 10" in finding.evidence
    assert "cable" in finding.remedy


def test_a_ring_that_overruns_is_to_be_made_longer(tmp_path: Path) -> None:
    counters = {"statistics/rx_packets": "1000000", "statistics/rx_missed_errors": "5000"}
    (finding,) = look(tree(tmp_path, eth0=counters), Ring(receive=512, most=8192)).findings
    assert (finding.severity, finding.remedy) == ("warning", "ethtool -G eth0 rx 8192")
    assert "rx_missed_errors 5000 of 1000000 frames; the receive ring has 512 of 8192" in finding.evidence
    (finding,) = look(tree(tmp_path, eth0=counters), Ring(receive=8192, most=8192)).findings
    assert "interrupts" in finding.remedy


def test_frames_that_cannot_be_sent_are_an_error(tmp_path: Path) -> None:
    (finding,) = look(tree(tmp_path, eth0={"statistics/tx_carrier_errors": "40"})).findings
    assert (finding.severity, finding.subject) == ("error", "eth0")
    assert "tx_carrier_errors 40" in finding.evidence


@pytest.fixture
def host() -> Iterator[Host]:
    """A healthy one, with three cards."""
    if why := why_not():
        pytest.skip(why)
    other_kind = Card("eth2", speed=1000, mtu=1500, model="0x0001")
    with cards(Card("eth0"), Card("eth1"), other_kind) as made:
        assert found_on(made) == []
        yield made


def found_on(host: Host) -> list[Finding]:
    return host.doctor("--only", "interfaces")


def test_a_card_slower_than_its_twin_is_found(host: Host) -> None:
    host.set(Card("eth1", speed=10_000))
    (finding,) = found_on(host)
    assert (finding.severity, finding.subject, finding.evidence) == (
        "warning",
        "eth1",
        "10 Gbit/s, while eth0, the same card, runs at 25 Gbit/s",
    )
    assert finding.remedy.startswith("compare ethtool eth1 with ethtool eth0")
    host.set(Card("eth1"))
    assert found_on(host) == []


def test_half_duplex_is_found(host: Host) -> None:
    slow = Card("eth2", speed=100, duplex="half", mtu=1500, model="0x0001")
    host.set(slow)
    (finding,) = found_on(host)
    assert (finding.subject, finding.evidence) == ("eth2", "expected full duplex, found half at 0.1 Gbit/s")
    assert finding.remedy.startswith("ethtool -s eth2 autoneg on")
    host.set(slow._replace(duplex="full"))
    assert found_on(host) == []


def test_a_fast_card_with_small_frames_is_found_and_the_remedy_helps(host: Host) -> None:
    host.set(Card("eth0", mtu=1500))
    (finding,) = found_on(host)
    assert finding.evidence == "expected an MTU of 9000 at 25 Gbit/s, found 1500"
    remedy = "ip link set dev eth0 mtu 9000"
    assert finding.remedy.startswith(remedy)
    subprocess.run(["ip", "-n", host.name, *remedy.split()[1:]], check=True)
    assert found_on(host) == []


def test_a_driver_without_rings_tells_of_none() -> None:
    assert read_ring("lo") is None
    assert read_ring("no-such-card") is None


def test_without_sysfs_there_is_nothing_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(Unable, match="sysfs"):
        look(tmp_path)
