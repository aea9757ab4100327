"""Three hosts with a spare survive the loss of any one of them, whichever roles it holds: the chaos suite.

A host is lost by kill -9 of all that runs there, or with its link, while what runs there goes on. Nothing that was
acknowledged is lost without a reason, and what it held is up again on the spare within ``WITHIN_S``, or on a machine
that is too busy for that in less time than the run took to start.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.hosts import Cluster, cluster
from tests.support import machines
from tests.support.audit import audited_file

USUAL = "0=coordinator,trainer,weightsync,reward 1=proxy 2=env"
MIXED = "0=coordinator,env 1=trainer,proxy 2=weightsync,reward,env"
WITHIN_S = 30.0

pytestmark = pytest.mark.skipif(bool(machines.why_not()), reason=machines.why_not() or "they can be made")


def check_the_books(played: Cluster, lost: int) -> None:
    """Every step is there once, in order, and every ticket has ended once or is accounted for."""
    final = played.end(lost=lost)
    audit = audited_file(played.run.path / "ledger.jsonl")
    versions = [step["version"] for step in played.run.steps()]
    assert versions == list(range(1, audit.version + 1))
    assert len(audit.trained) == audit.version * 2 * 4
    assert (final["admitted"], final["trained"]) == (len(audit.state), len(audit.trained))
    assert (final["lost"], final["evicted"]) == (audit.lost.total(), audit.evicted.total())


def test_a_lost_host_is_replaced_by_the_spare(tmp_path: Path) -> None:
    with cluster(tmp_path, USUAL) as played:
        played.until_ready()
        print(played.lose(0, "kill"))
        check_the_books(played, lost=0)


@pytest.mark.deep
@pytest.mark.parametrize("roles", [USUAL, MIXED])
@pytest.mark.parametrize("how", ["kill", "cut"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_any_host_can_be_lost(tmp_path: Path, roles: str, how: str, number: int) -> None:
    with cluster(tmp_path, roles) as played:
        played.until_ready()
        took = played.lose(number, how)
        print(f"{roles}: host {number}, {how}: " + ", ".join(f"{role} {after:.1f} s" for role, after in took.items()))
        check_the_books(played, lost=number)
        assert max(took.values()) < max(WITHIN_S, played.started_s)
