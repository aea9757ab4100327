"""Engines under the conformance suite (``test_conformance_*``): each started once, whatever asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from actors.proxy.engines import EngineKind
from tests.engines.rigs import Rig, Rigs

KINDS: list[EngineKind] = ["torch", "vllm"]


@pytest.fixture(scope="package")
def rigs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rigs]:
    """Rigs by engine and tied embeddings, each started once."""
    started: dict[tuple[EngineKind, bool], Rig] = {}

    def rig_of(kind: EngineKind, tied: bool) -> Rig:
        if kind == "vllm":
            pytest.importorskip("vllm")
        if (kind, tied) not in started:
            started[kind, tied] = Rig(kind, tmp_path_factory.mktemp("policy"), tied=tied)
        return started[kind, tied]

    yield rig_of
    for rig in started.values():
        rig.engine.close()


def ready(rig: Rig) -> Iterator[Rig]:
    rig.load(0)
    yield rig
    assert rig.engine.unfinished() == 0


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest, rigs: Rigs) -> Iterator[Rig]:
    """Each engine, with tied embeddings."""
    yield from ready(rigs(request.param, True))


@pytest.fixture(params=["tied", "untied"])
def head_rig(request: pytest.FixtureRequest, rigs: Rigs, kind: EngineKind) -> Iterator[Rig]:
    """Each engine with and without tied embeddings, for what depends on the head."""
    yield from ready(rigs(kind, request.param == "tied"))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> EngineKind:
    chosen: EngineKind = request.param
    return chosen
