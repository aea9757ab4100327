"""What is left of engines when their proxy is killed with -9: nothing, within seconds."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from actors.proxy.engines import EngineKind
from actors.proxy.engines.protocol import EngineLimits
from tests.engines.reference import MAX_MODEL_LEN, MAX_SEQUENCES, Reference, write_tiny_policy
from tests.proxy.gateway import GatewaySettings
from tests.proxy.operating import site
from tests.support.loops import run

GONE_S = 5.0
LIMIT_S = 300.0


def _family(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for process in processes for one in (process, *process.children(recursive=True))]


async def _killed(directory: Path, kind: EngineKind) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """A proxy's engines and whatever they had started, and which of these are left a little after its end."""
    reference = Reference(write_tiny_policy(directory / "policy", tied=True))
    limits = EngineLimits(MAX_SEQUENCES, MAX_MODEL_LEN)
    settings = GatewaySettings(kind=kind, policy_directory=str(directory / "policy"), limits=limits, engines=1)
    async with site(directory, ["proxy-0"], settings, reference) as made:
        proxy = made.operator.children["proxy-0"].pid
        family = _family(list(made.operator.engines("proxy-0").values()))
        made.operator.give_up()
        os.kill(proxy, signal.SIGKILL)
        _, left = psutil.wait_procs(family, timeout=GONE_S)
        return family, left


def test_engines_die_with_a_proxy_that_is_killed(tmp_path: Path) -> None:
    family, left = run(_killed(tmp_path, "torch"), LIMIT_S)
    assert family
    assert left == []


@pytest.mark.deep
def test_vllm_engines_die_with_a_proxy_that_is_killed_and_so_does_what_they_started(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    family, left = run(_killed(tmp_path, "vllm"), LIMIT_S)
    assert family
    assert left == []
