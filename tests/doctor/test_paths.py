"""Ways between hosts that are really damaged: namespaces on a bridge, and a wire that loses or delays packets."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from hwprobe.doctor import Unable, paths
from hwprobe.doctor.echo import Echo, checksum
from hwprobe.doctor.peers import Peer, PeerError, parse_peer
from tests.doctor.conftest import set_mtu
from tests.support.machines import Machine
from tests.support.namespaces import End, Line, within
from tests.support.ports import free_port


def test_a_way_with_jumbo_frames_from_end_to_end_is_healthy(pair: tuple[Machine, Machine]) -> None:
    one, other = pair
    peer = Peer(other.address)
    examined = within(one.name, lambda: paths.look_mtu([peer]))
    assert examined.findings == []
    assert examined.notes == [f"{other.address}: packets of 9000 bytes pass (eth0)"]
    assert within(one.name, lambda: paths.look_loss([peer])).findings == []


def test_a_host_that_takes_only_small_frames_is_found_and_the_remedy_helps(pair: tuple[Machine, Machine]) -> None:
    one, other = pair
    set_mtu(other, 1500)
    (finding,) = within(one.name, lambda: paths.look_mtu([Peer(other.address)])).findings
    assert (finding.severity, finding.subject) == ("error", other.address)
    assert "sends packets of up to 9000 bytes, the way to" in finding.evidence
    assert "carries 1500 " in finding.evidence
    assert finding.remedy.startswith("ip link set dev eth0 mtu 1500 here")
    set_mtu(one, 1500)
    assert within(one.name, lambda: paths.look_mtu([Peer(other.address)])).findings == []


@pytest.mark.parametrize(
    ("passing", "rungs", "told"), [(1504, 16, 1500), (1500, 7, 1500), (1499, 16, 1499), (9000, 5, 9000)]
)
def test_a_usual_mtu_is_told_as_such_whatever_sizes_were_tried(
    passing: int, rungs: int, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "RUNGS", rungs)

    class Way(Echo):
        def __init__(self) -> None:
            """Sends nothing."""

        def passes(self, size: int, *, tries: int, timeout_s: float) -> bool:
            return size <= passing

        def largest(self, sizes: Sequence[int], *, tries: int, timeout_s: float) -> int:
            return max((size for size in sizes if size <= passing), default=0)

    assert paths.largest(Way(), 9000) == told


def test_a_way_that_carries_less_than_both_hosts_send_is_measured(damaged: tuple[End, End, Line]) -> None:
    one, other, line = damaged
    line.largest = 4321
    (finding,) = within(one.name, lambda: paths.look_mtu([Peer(other.address)])).findings
    carried = int(finding.evidence.split("carries ")[1].split()[0])
    assert 4321 - paths.STEP <= carried <= 4321


def test_a_fast_link_with_small_frames_is_a_warning(pair: tuple[Machine, Machine], tmp_path: Path) -> None:
    one, other = pair
    for machine in pair:
        set_mtu(machine, 1500)
    peers = [Peer(other.address)]
    assert within(one.name, lambda: paths.look_mtu(peers, tmp_path)).findings == []  # a link of unknown speed
    card = tmp_path / "class" / "net" / "eth0"
    card.mkdir(parents=True)
    (card / "speed").write_text("25000\n")
    (finding,) = within(one.name, lambda: paths.look_mtu(peers, tmp_path)).findings
    assert finding.severity == "warning"
    assert finding.evidence == "expected an MTU of 9000 at 25 Gbit/s, found 1500 (eth0)"
    (card / "speed").write_text("1000\n")
    assert within(one.name, lambda: paths.look_mtu(peers, tmp_path)).findings == []


def test_lost_packets_are_counted(damaged: tuple[End, End, Line]) -> None:
    one, other, line = damaged
    line.drop_every = 10  # of both directions: every fifth echo
    (finding,) = within(one.name, lambda: paths.look_loss([Peer(other.address)])).findings
    assert finding.severity == "error"
    lost, _, sent = finding.evidence.split()[:3]
    assert sent == "50"
    assert 8 <= int(lost) <= 12
    assert "policer" in finding.cause


def test_a_way_that_holds_packets_up_is_found(damaged: tuple[End, End, Line]) -> None:
    one, other, line = damaged
    line.delay_s = 0.02
    (finding,) = within(one.name, lambda: paths.look_loss([Peer(other.address)])).findings
    assert finding.severity == "warning"
    assert float(finding.evidence.split("took ")[1].split()[0]) >= 35.0  # there and back; timers round to milliseconds


def test_a_host_that_is_down_is_an_error(pair: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "ANSWER_S", 0.2)
    monkeypatch.setattr(paths, "CONNECT_S", 0.5)
    one, other = pair
    other.cut()
    peer = Peer(other.address, 5610)
    (finding,) = within(one.name, lambda: paths.look_loss([peer])).findings
    assert (finding.severity, finding.subject) == ("error", other.address)
    assert "no answer" in finding.evidence
    (finding,) = within(one.name, lambda: paths.look_ports([peer])).findings
    assert finding.cause == "the host is down, or a firewall drops it"


def test_a_host_that_answers_no_echoes_is_healthy_where_its_port_does(
    pair: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "ANSWER_S", 0.2)
    one, other = pair
    ignore = Path("/proc/sys/net/ipv4/icmp_echo_ignore_all")
    within(other.name, lambda: ignore.write_text("1"))
    try:
        with within(other.name, lambda: socket.create_server((other.address, 0))) as server:
            peer = Peer(other.address, server.getsockname()[1])
            examined = within(one.name, lambda: paths.look_loss([peer]))
        assert examined.findings == []
        assert examined.notes == [f"{other.address}: echo requests are filtered; its port answers"]
        assert len(within(one.name, lambda: paths.look_loss([Peer(other.address)])).findings) == 1
    finally:
        within(other.name, lambda: ignore.write_text("0"))


def test_no_route_is_an_error(pair: tuple[Machine, Machine]) -> None:
    (finding,) = within(pair[0].name, lambda: paths.look_loss([Peer("192.0.2.1")])).findings
    assert finding.evidence == "no way leads there from this host"


def test_a_port_at_which_nothing_listens_is_told_from_one_that_is_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert paths.look_ports([Peer("127.0.0.1", port)]).findings == []
    silent = free_port()
    (finding,) = paths.look_ports([Peer("127.0.0.1", silent)]).findings
    assert (finding.evidence, finding.cause) == (
        "the connection is refused",
        f"nothing listens at port {silent} there",
    )
    assert f"--serve --host 127.0.0.1 --port {silent}" in finding.remedy


def test_without_other_hosts_there_is_nothing_to_look_at() -> None:
    for look in (paths.look_mtu, paths.look_loss):
        with pytest.raises(Unable, match="no other host was named"):
            look([Peer("127.0.0.1")])


def test_peers_are_addresses_with_or_without_a_port() -> None:
    assert parse_peer("10.0.0.2") == Peer("10.0.0.2")
    assert parse_peer("tcp://10.0.0.2:5610") == Peer("10.0.0.2", 5610)
    assert parse_peer("localhost:80") == Peer("127.0.0.1", 80)
    for bad in ("", "tcp://10.0.0.2", "10.0.0.2:0", "10.0.0.2:x"):
        with pytest.raises(PeerError, match="expected an address"):
            parse_peer(bad)


def test_the_checksum_is_the_internets() -> None:
    """RFC 1071, section 3: the sum of 00 01 f2 03 f4 f5 f6 f7 is ddf2."""
    assert checksum(bytes.fromhex("0001f203f4f5f6f7")) == ~0xDDF2 & 0xFFFF
    assert checksum(b"\x01") == ~0x0100 & 0xFFFF
