"""Incarnations of other nodes."""

import pytest

from bus.message import NodeAddress, PeerLost, PeerRestarted
from bus.peers import REMEMBERED_LOSSES, Meeting, Peers


def address(epoch: int, *, name: str = "b", control: str = "tcp://h:1", bulk: str = "tcp://h:2") -> NodeAddress:
    return NodeAddress(name, control, bulk, epoch)


@pytest.fixture
def peers() -> Peers:
    """Has heard incarnation 5 of ``b``."""
    peers = Peers()
    assert peers.meet(address(5), 10.0) is Meeting.NEW
    assert peers.admit(address(5), 10.0) is None
    return peers


def test_a_node_is_known_from_its_first_message_on(peers: Peers) -> None:
    assert peers.meet(address(5), 11.0) is Meeting.KNOWN
    assert peers.last_heard("b") == 11.0
    assert peers.newest("b") == address(5)


def test_it_is_heard_under_its_own_routing_id_alone_and_only_while_it_is_the_newest(peers: Peers) -> None:
    assert peers.hear(b"b/5", address(5), 11.0)
    assert peers.last_heard("b") == 11.0
    assert not peers.hear(b"c/5", address(5), 12.0)
    assert not peers.hear(b"b/5", address(5, control="tcp://h:9"), 12.0)
    assert not peers.hear(b"b/6", address(6), 12.0)
    assert peers.last_heard("b") == 11.0
    peers.admit(address(6), 13.0)
    assert not peers.hear(b"b/5", address(5), 14.0)
    assert peers.hear(b"b/6", address(6), 14.0)
    peers.lose(address(6), "it burnt")
    assert not peers.hear(b"b/6", address(6), 15.0)


def test_a_successor_takes_its_place(peers: Peers) -> None:
    assert peers.meet(address(6), 11.0) is Meeting.NEW
    assert peers.admit(address(6), 11.0) == address(5)
    assert peers.meet(address(5), 12.0) is Meeting.STALE
    assert isinstance(peers.refusal(address(5)), PeerRestarted)
    assert peers.refusal(address(6)) is None


def test_what_was_lost_stays_lost_until_its_successor_comes(peers: Peers) -> None:
    assert peers.lose(address(5), "it burnt") == address(5)
    assert peers.meet(address(5), 12.0) is Meeting.STALE
    refusal = peers.refusal(address(5))
    assert isinstance(refusal, PeerLost)
    assert "it burnt" in str(refusal)
    assert peers.last_heard("b") is None
    assert peers.refusal(address(6)) is None, "a successor that we know only by its ref may be asked"
    assert peers.meet(address(6), 13.0) is Meeting.NEW


def test_a_loss_of_an_earlier_incarnation_does_not_concern_the_living(peers: Peers) -> None:
    assert peers.lose(address(4), "late news") is None
    assert peers.meet(address(5), 11.0) is Meeting.KNOWN


def test_an_incarnation_can_be_lost_before_it_was_heard() -> None:
    peers = Peers()
    assert peers.lose(address(5), "never came up") == address(5)
    assert isinstance(peers.refusal(address(5)), PeerLost)


def test_whichever_incarnation_answers_is_always_worth_a_try(peers: Peers) -> None:
    assert peers.lose(address(0, bulk=""), "it is gone") == address(5)
    assert peers.refusal(address(0)) is None
    assert isinstance(peers.refusal(address(5)), PeerLost)


@pytest.mark.parametrize(
    "claimed",
    [
        address(5, control="tcp://elsewhere:1"),
        address(6, control="ipc:///tmp/x"),
        address(6, bulk=""),
        address(0, name="c"),
        address(-1, name="c"),
        address(1, name=""),
    ],
    ids=["another place for the same incarnation", "no tcp", "no bulk lane", "no epoch", "negative epoch", "no name"],
)
def test_a_false_address_is_not_believed(peers: Peers, claimed: NodeAddress) -> None:
    assert peers.meet(claimed, 11.0) is Meeting.FALSE
    assert peers.newest("b") == address(5)


def test_losses_are_remembered_within_bounds() -> None:
    peers = Peers()
    for number in range(REMEMBERED_LOSSES + 10):
        peers.lose(address(1, name=f"n{number}"), "gone")
    assert peers.refusal(address(1, name="n0")) is None
    assert peers.refusal(address(1, name="n10")) is not None
